"""The tensors of a GGUF file, each with where its values come from: one list for planning, writing and reading back.

A slot joins the checkpoint's tensors to one tensor of the file. Between the two lie only steps that can be undone:
zero-padding (of the dims, by their axes), cutting a fused tensor into its segments or joining parts, the row
permutation of the rotary convention, a folded factor and Gemma's 1 + weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from acc.backends.llamacpp.hosts import FAMILIES, Choice, folds, rope
from acc.ir import Axis, ModelIR, Tensor, present_tensors
from acc.model import kept_layers
from acc.slicing import written_name

Values = npt.NDArray[np.float32]
Read = Callable[[str], "Values"]
"""A tensor of the checkpoint by its name, as float32."""

PARTS: dict[str, tuple[str, ...]] = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_up": ("ffn_gate", "ffn_up")}
"""The segments of a fused row axis, as tensors of their own (Phi-3: qkv_proj and gate_up_proj)."""


@dataclass(frozen=True)
class Source:
    """A tensor of the IR, or one segment of its row axis, with its name in the checkpoint ("" where there is none)."""

    tensor: Tensor
    stored: str
    segment: int | None = None


@dataclass(frozen=True)
class Slot:
    """One tensor of the file.

    Attributes:
        name: in the file, `blk.3.attn_q.weight`.
        kind: `attn_q`; for a token embedding that also is the output matrix, `output`.
        shape: rows and columns, or one size.
        layer: the layer's number in the parent, None outside the layers.
        sources: whose rows are joined, in order; none for `values`.
        heads: rows are permuted head by head if this is not 0.
        factor: what the values are multiplied by.
        shift: what is added before that.
        values: for a tensor that is computed and not read.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    layer: int | None
    sources: tuple[Source, ...] = ()
    heads: int = 0
    factor: float = 1.0
    shift: float = 0.0
    values: tuple[float, ...] = ()

    @property
    def columns(self) -> int:
        """Length of one row: what block sizes must divide."""
        return self.shape[-1]

    @property
    def empty(self) -> bool:
        """Whether nothing of it is in the checkpoint, so that its matrices are zero."""
        return bool(self.sources) and not any(source.stored for source in self.sources)


# From the IR to slots ------------------------------------------------------------------------------------------------


def slots(ir: ModelIR, choice: Choice) -> list[Slot]:
    """The tensors of the file that holds `choice.held`, in the checkpoint's order."""
    found: list[Slot] = []
    parts: dict[tuple[int | None, str], Slot] = {}
    names = {kind: fused for fused, kinds in choice.host.fused.items() for kind in kinds}
    for slot in _plain(ir, choice):
        fused = names.get(slot.kind)
        if fused is None:
            found.append(slot)
            continue
        parts[slot.layer, slot.kind] = slot
        group = [parts.get((slot.layer, kind)) for kind in choice.host.fused[fused]]
        if all(group):
            found.append(_joined(fused, [one for one in group if one]))
    factors = _rope_factors(ir)
    if factors:
        found.append(Slot("rope_freqs.weight", "rope_freqs", (len(factors),), None, values=factors))
    return found


def _plain(ir: ModelIR, choice: Choice) -> Iterator[Slot]:
    """One slot per tensor, or per segment where the host stores apart what the checkpoint fuses."""
    held, host = choice.held, choice.host
    layers, factors = kept_layers(held), folds(ir, host)
    kinds = _kind_names(FAMILIES[ir.family].own, held.depth())
    for tensor in present_tensors(held):
        layer = _layer(tensor)
        kind, suffix = kinds(tensor)
        rank = None if layer is None else layers.index(layer)
        stored = written_name(ir, tensor) if ir.present(tensor) else ""
        split = len(tensor.axes[0]) > 1 and kind in PARTS and not host.packed
        pieces = [(part, index) for index, part in enumerate(PARTS[kind])] if split else [(kind, None)]
        for part, segment in pieces:
            axes = ((tensor.axes[0][segment],), *tensor.axes[1:]) if segment is not None else tensor.axes
            shape = tuple(held.axis_size(axis) for axis in axes)
            slot = Slot(
                name=f"{part}.{suffix}" if rank is None else f"blk.{rank}.{part}.{suffix}",
                kind=part,
                shape=shape,
                layer=layer,
                sources=(Source(tensor, stored, segment),),
                heads=shape[0] // held.head_dim() if host.rope == "norm" and part in ("attn_q", "attn_k") else 0,
                factor=factors.get(part, 1.0),
                shift=1.0 if ir.family == "gemma3_text" and part.endswith("norm") else 0.0,
            )
            yield from _embedding(slot, held, factors) if part == "token_embd" else (slot,)


def _embedding(slot: Slot, held: ModelIR, factors: dict[str, float]) -> Iterator[Slot]:
    """The token embedding: alone if tied, with an output matrix of its own if folding made the two differ."""
    if not held.model_shape().tied:
        yield slot
    elif "output" in factors:
        yield slot
        yield replace(slot, name="output.weight", kind="output", factor=factors["output"])
    else:
        yield replace(slot, kind="output")


def _joined(fused: str, parts: list[Slot]) -> Slot:
    first = parts[0]
    rows = sum(part.shape[0] for part in parts)
    sources = tuple(source for part in parts for source in part.sources)
    name = first.name.replace(f".{first.kind}.", f".{fused}.")
    return Slot(name, fused, (rows, *first.shape[1:]), first.layer, sources)


def _kind_names(arch: str, depth: int) -> Callable[[Tensor], tuple[str, str]]:
    """From an IR tensor to its kind and suffix in the family's own architecture, by gguf's table of names."""
    import gguf

    names = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(names[arch], depth)

    def kind(tensor: Tensor) -> tuple[str, str]:
        for name in (tensor.name, *tensor.aliases):
            stem, _, suffix = name.rpartition(".")
            found = table.get_name(stem)
            if found and not (tensor.aliases and found == "output"):
                return found.rpartition(".")[2], suffix
        raise KeyError(f"gguf has no name for {tensor.name} in {arch}")

    return kind


def _layer(tensor: Tensor) -> int | None:
    return next((int(name.partition(".")[2]) for name in tensor.presence if name.startswith("layer.")), None)


# Values there and back -----------------------------------------------------------------------------------------------


def gather(slot: Slot, ir: ModelIR, held: ModelIR, read: Read) -> Values:
    """The values of a slot, float32 in its shape, from the checkpoint's tensors."""
    if slot.values:
        return np.array(slot.values, np.float32)
    value = np.concatenate([_piece(source, slot, ir, held, read) for source in slot.sources])
    if slot.heads:
        value = interleave(value, slot.heads)
    return value * np.float32(slot.factor) if slot.factor != 1.0 else value


def scatter(slot: Slot, value: Values, ir: ModelIR, held: ModelIR) -> Iterator[tuple[Source, Values]]:
    """The inverse of `gather`: what a slot's values say about each of its sources that the checkpoint has."""
    value = value / np.float32(slot.factor) if slot.factor != 1.0 else value
    value = deinterleave(value, slot.heads) if slot.heads else value
    start = 0
    for source in slot.sources:
        axes = _axes(source)
        rows = held.axis_size(axes[0])
        part, start = value[start : start + rows], start + rows
        if source.stored:
            yield source, part[np.ix_(*(places(axis, ir, held) for axis in axes))] - np.float32(slot.shift)


def _piece(source: Source, slot: Slot, ir: ModelIR, held: ModelIR, read: Read) -> Values:
    axes = _axes(source)
    shape = [held.axis_size(axis) for axis in axes]
    if not source.stored:
        # The norm before a sub-block that adds nothing: any gain will do.
        return np.full(shape, 1.0 if slot.kind.endswith("norm") else 0.0, np.float32)
    value = read(source.stored)
    if source.segment is not None:
        start = sum(ir.axis_size((segment,)) for segment in source.tensor.axes[0][: source.segment])
        value = value[start : start + ir.axis_size(axes[0])]
    value = value + np.float32(slot.shift) if slot.shift else value
    if list(value.shape) == shape:
        return value
    whole = np.zeros(shape, np.float32)
    whole[np.ix_(*(places(axis, ir, held) for axis in axes))] = value
    return whole


def _axes(source: Source) -> tuple[Axis, ...]:
    axes = source.tensor.axes
    return axes if source.segment is None else ((axes[0][source.segment],), *axes[1:])


def places(axis: Axis, ir: ModelIR, held: ModelIR) -> list[int]:
    """Where the entries of an axis lie in the padded one: the first of each dim, padding after them."""
    found: list[int] = []
    offset = 0
    for segment in axis:
        flat = [0]
        for name in segment:
            flat = [major * held.size(name) + minor for major in flat for minor in range(ir.size(name))]
        found += [offset + index for index in flat]
        offset += math.prod(held.size(name) for name in segment)
    return found


def interleave(value: Values, heads: int) -> Values:
    """Rows of each head from Transformers' halves (0..d/2, d/2..d) to neighbouring pairs, as NORM rope rotates them."""
    rows = value.shape[0] // heads
    return value.reshape(heads, 2, rows // 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


def deinterleave(value: Values, heads: int) -> Values:
    """The inverse of `interleave`."""
    rows = value.shape[0] // heads
    return value.reshape(heads, rows // 2, 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


def _rope_factors(ir: ModelIR) -> tuple[float, ...]:
    """What each rotary frequency is divided by under Llama 3's scaling (Transformers, `_compute_llama3_parameters`)."""
    found = rope(ir.config)
    if found["rope_type"] != "llama3":
        return ()
    factor, low, high = found["factor"], found["low_freq_factor"], found["high_freq_factor"]
    context, size = found["original_max_position_embeddings"], ir.head_dim()
    factors = []
    for index in range(0, size, 2):
        length = 2 * math.pi * found["rope_theta"] ** (index / size)
        smooth = (context / length - low) / (high - low)
        factors.append(1 / ((1 - smooth) / factor + smooth) if context / high <= length <= context / low else 1.0)
        if length > context / low:
            factors[-1] = factor
    return tuple(factors)
