"""What llama.cpp holds in memory for a model of some shape: weights, KV cache, compute buffer, output buffer.

Weights, cache and output follow from sizes and are exact. The compute buffer is the peak of the engine's own allocator
over the largest graph that it reserves (a whole `ubatch` of tokens, every one with logits); its peaks below were found
by varying one size at a time. What the allocator loses between blocks is what `COMPUTE_ERROR` allows for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from acc.backends.llamacpp.options import CACHE_TYPES, Options
from acc.backends.llamacpp.work import Body

CELLS = 256
"""The cache is a multiple of so many tokens (`llama_kv_cache` pads it)."""
CACHE_BYTES = {
    "f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32, "q4_1": 20 / 32, "q5_0": 22 / 32,
    "q5_1": 24 / 32, "iq4_nl": 18 / 32,
}  # fmt: skip
"""Bytes per element of the cache types."""
assert CACHE_BYTES.keys() == CACHE_TYPES.keys()
COMPUTE_ERROR = 0.1
"""How far the compute buffer may be off where the FFN and not the vocabulary makes its peak, as a fraction of it."""


@dataclass(frozen=True)
class Memory:
    """Bytes by buffer, named as `Session.memory` names them, and the half-width of the total's band in bytes."""

    weights: int
    kv: int
    compute: int
    output: int
    band: int

    @property
    def total(self) -> int:
        """The sum of the buffers."""
        return self.weights + self.kv + self.compute + self.output

    def to_json(self) -> Mapping[str, int]:
        """The buffers and their total."""
        return {
            "weights": self.weights,
            "kv": self.kv,
            "compute": self.compute,
            "output": self.output,
            "total": self.total,
        }


def memory(body: Body, options: Options) -> Memory:
    """The memory of a model that is loaded with these options."""
    shape = body.held
    flash = options.flash_attn != "off"  # `auto` turns it on wherever the device can, and CPUs can
    cells = _padded(options.context, CELLS)
    ubatch = min(options.ubatch, options.batch, cells * options.sequences)
    keys = [layer.kv_heads * shape.head_dim for layer in shape.layers if not layer.dropped]
    # Without flash attention V lies transposed, as wide as the widest in every layer, even one that has no attention
    # (llama-kv-cache.cpp).
    values = keys if flash else [max(keys)] * len(keys)
    per_token = sum(keys) * CACHE_BYTES[options.type_k] + sum(values) * CACHE_BYTES[options.type_v]
    compute = _compute(body, ubatch, cells, flash)
    return Memory(
        weights=body.weight_bytes,
        kv=round(options.sequences * cells * per_token),
        compute=compute,
        output=4 * shape.vocab * options.sequences,
        band=round(COMPUTE_ERROR * (compute - 4 * ubatch * shape.vocab)) if compute > 4 * ubatch * shape.vocab else 0,
    )


def _compute(body: Body, ubatch: int, cells: int, flash: bool) -> int:
    """Bytes of the compute buffer: per token of the batch, the wider of the last step (logits) and the widest layer."""
    shape = body.held
    logits = shape.vocab + 5.5 * shape.hidden
    ffn = 4 * shape.hidden + 3 * max(layer.ffn for layer in shape.layers)
    heads = max(layer.heads for layer in shape.layers)
    scores = 0 if flash else heads * cells + 4 * shape.hidden + 2 * heads * shape.head_dim
    mask = 2 * cells * ubatch
    return round(4 * ubatch * max(logits, ffn, scores) + mask)


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
