"""Which GGUF type each tensor gets: llama.cpp's own mixes, pinned to the layer numbers of the *parent*.

llama.cpp raises some tensors above the base type by counting the tensors of a kind as they pass (`use_more_bits` in
`src/llama-quant.cpp`). In a model that lost a layer or a sub-block the count shifts and every later layer gets another
type than the same layer of its parent. Here the parent's layer number and depth decide, so that parent and child are
compared in the same format, layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from acc.diag import AccError, nearest

Where = Callable[[int, int], bool]
"""Whether a layer, by its number and the depth in the parent, gets more bits."""


def _everywhere(layer: int, depth: int) -> bool:
    return True


def _sensitive(layer: int, depth: int) -> bool:
    """The first and the last eighth and every third layer between: `use_more_bits` of llama.cpp."""
    first = depth // 8
    return layer < first or layer >= 7 * depth // 8 or (layer - first) % 3 == 2


def _below(count: int) -> Where:
    return lambda layer, depth: layer < count


def _first_part(parts: int) -> Where:
    return lambda layer, depth: layer < depth // parts


@dataclass(frozen=True)
class Mix:
    """One number format of a whole file.

    Attributes:
        base: the type of every matrix that no rule names.
        file_type: llama.cpp's `general.file_type`.
        output: the type of the output matrix, and of a token embedding that serves as one.
        rules: by kind of tensor, the first type whose condition holds.
    """

    base: str
    file_type: int
    output: str
    rules: Mapping[str, tuple[tuple[str, Where], ...]] = field(default_factory=dict)

    @property
    def block(self) -> int:
        """Columns that a row must be a multiple of: 256 for K-quants, else 32 (1 for F16)."""
        return block(self.base)[0]


def block(name: str) -> tuple[int, int]:
    """Weights and bytes per block of a type."""
    import gguf

    weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    return int(weights), int(size)


FALLBACKS: dict[str, str] = {"Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""What a K-quant becomes where the columns are no multiple of 256 (`tensor_type_fallback` in llama-quant.cpp)."""

_MEDIUM = ("Q6_K", _sensitive)

MIXES: dict[str, Mix] = {
    "f16": Mix("F16", 1, "F16"),
    "q8_0": Mix("Q8_0", 7, "Q8_0"),
    "q4_0": Mix("Q4_0", 2, "Q6_K"),
    "q3_k_m": Mix(
        "Q3_K",
        12,
        "Q6_K",
        {
            "attn_v": (("Q5_K", _below(2)), ("Q4_K", _everywhere)),
            "ffn_down": (("Q5_K", _first_part(16)), ("Q4_K", _everywhere)),
            "attn_output": (("Q4_K", _everywhere),),
            "attn_qkv": (("Q4_K", _everywhere),),
        },
    ),
    "q4_k_s": Mix("Q4_K", 14, "Q6_K", {"attn_v": (("Q5_K", _below(4)),), "ffn_down": (("Q5_K", _first_part(8)),)}),
    "q4_k_m": Mix(
        "Q4_K",
        15,
        "Q6_K",
        {"attn_v": (_MEDIUM,), "ffn_down": (_MEDIUM,), "attn_qkv": (("Q5_K", _everywhere),)},
    ),
    "q5_k_m": Mix(
        "Q5_K",
        17,
        "Q6_K",
        {"attn_v": (_MEDIUM,), "ffn_down": (_MEDIUM,), "attn_qkv": (("Q6_K", _everywhere),)},
    ),
    "q6_k": Mix("Q6_K", 18, "Q6_K"),
}


def mix(quant: str) -> Mix:
    """The mix of a format's name. Raises AccError LC020 for one that acc does not write."""
    if quant not in MIXES:
        raise AccError.of("LC020", quant, "acc does not write this GGUF format", nearest(quant, MIXES))
    return MIXES[quant]


def wanted(quant: str, kind: str, columns: int, layer: int | None, depth: int) -> str:
    """The type that a matrix should have.

    Args:
        kind: its GGUF name without block number and suffix, such as `ffn_down`; `output` for a tied token embedding.
        layer: its layer's number in the parent, None outside the layers.
        depth: layers of the parent.
    """
    chosen = mix(quant)
    if kind == "output":
        # llama.cpp's own choice for an output matrix whose columns do not fit, not a fallback.
        return chosen.output if columns % block(chosen.output)[0] == 0 else "Q8_0" if columns % 32 == 0 else "F16"
    rules = chosen.rules.get(kind, ()) if layer is not None else ()
    return next((name for name, where in rules if where(layer or 0, depth)), chosen.base)


def stored(name: str, columns: int) -> str:
    """The type that a matrix of so many columns can have when `name` is wanted."""
    while columns % block(name)[0]:
        name = FALLBACKS.get(name, "F16")
    return name
