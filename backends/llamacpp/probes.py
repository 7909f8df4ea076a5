"""Probe models: GGUF files of any shape with random weights, which take the engine as long as real weights would.

The engine's time does not depend on the values of the weights as long as they make ordinary numbers, so one tile of
random blocks per number format is repeated over each tensor; a file of 100 MB is written in a fraction of a second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from acc.backend_api import TensorPlan
    from acc.backends.llamacpp.slots import Slot
    from acc.ir import ModelIR

_TILE = 4096
"""Blocks in a tile, enough for a matrix whose rows all differ within a cache line's neighbourhood."""
_STD = 0.02
"""Standard deviation of the weights: an ordinary initialisation's, far from overflow and from denormal numbers."""
_SCALES: Mapping[str, tuple[tuple[int, float], ...]] = {
    "Q4_0": ((0, 1),),
    "Q4_1": ((0, 1), (2, -7.5)),
    "Q5_0": ((0, 1),),
    "Q5_1": ((0, 1), (2, -15.5)),
    "Q8_0": ((0, 1),),
    "Q2_K": ((80, 1), (82, 1.5)),
    "Q3_K": ((108, 1),),
    "Q4_K": ((0, 1), (2, 7.5)),
    "Q5_K": ((0, 1), (2, 15.5)),
    "Q6_K": ((208, 1),),
    "IQ4_NL": ((0, 1),),
    "IQ4_XS": ((0, 1),),
}
"""Byte offsets of the float16 scales in a block (the structs of ggml-common.h) and their ratio to the first; the rest
may be random. A minimum is as large as what it is taken from on average, so that weights have no mean: with one,
attention scores grow until their exponentials underflow, and denormal numbers take a processor several times as long.
"""


def probe_formats() -> frozenset[str]:
    """The number formats that probe files can be written in."""
    return frozenset(_SCALES) | {"F32", "F16", "BF16"}


@cache
def _tile(kind: str) -> np.ndarray:
    """Random blocks of one format, uint8 [_TILE, bytes of a block], whose weights have the standard deviation _STD."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    rng = np.random.default_rng(0)
    qtype = GGMLQuantizationType[kind]
    if kind not in _SCALES:
        values = rng.normal(0, _STD, _TILE).astype(np.float32)
        if kind == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(_TILE, 2)
        values = values.astype(np.float16) if kind == "F16" else values
        return values.view(np.uint8).reshape(_TILE, values.itemsize)
    blocks = rng.integers(0, 256, (_TILE, GGML_QUANT_SIZES[qtype][1]), dtype=np.uint8)
    for scale in (np.float16(1), None):
        value = scale if scale is not None else np.float16(_STD / dequantize(blocks, qtype).std())
        for offset, ratio in _SCALES[kind]:
            scaled = np.float16(value * np.float16(ratio))
            blocks[:, offset : offset + 2] = np.frombuffer(scaled.tobytes(), np.uint8)
    return blocks


def weights(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random weights of a stored tensor, uint8 [rows, bytes of a row]; `shape` in elements, the input size last."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    elements, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    tile = _tile(kind)
    flat = np.resize(tile, (math.prod(shape) // elements, tile.shape[1]))
    return flat.reshape(*shape[:-1], shape[-1] // elements * size)


def write_probe(ir: ModelIR, quant: str, out: Path) -> None:
    """Write the file that `ir.arch` is lowered to in a number format, with random weights and without a tokenizer.

    Raises:
        AccError: LC001 or LC002 if no host holds the shape.
    """
    import numpy as np

    from acc.backends.llamacpp.writer import draft

    def packed(index: int, slot: Slot, plan: TensorPlan) -> np.ndarray:
        if len(plan.shape) == 1:
            return np.ones(plan.shape, np.float32)
        return weights(plan.type, plan.shape)

    draft(ir, quant, None).write_packed(out, packed)
