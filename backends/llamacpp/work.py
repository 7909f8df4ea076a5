"""What llama.cpp has to do for a model of some shape: matrices in their stored types, and the amounts that take time.

The classes of work say what a CPU spends its time on; how long a unit of each takes is fitted to measurements
(`acc.costfit`). While decoding, every matrix is read once per token: bytes per type, since each type has its own
kernel, and those bytes once more that do not stay in the caches from token to token (`spill`). While a prompt is
processed, multiplications per type count. Beside them: rows (each dot product has a beginning and an end), sub-blocks
entered (a graph node costs a barrier between the threads however small it is), and attention, which grows with the
context.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from acc.backends.llamacpp import types
from acc.backends.llamacpp.hosts import FAMILIES, HOSTS, Host, choose
from acc.costfit import Work
from acc.diag import AccError
from acc.ir import LayerShape, ModelIR, ModelShape

Sizes = tuple[int, ...]

CELLS = 256
"""The KV cache is attended to in multiples of so many tokens."""
SPLIT_CELLS = 512
"""From so many on, ggml splits one request's attention by tokens, not by heads."""


@dataclass(frozen=True)
class Stored:
    """One tensor of the file: its kind (`attn_q`, `output`...), shape (input size last), type and bytes."""

    kind: str
    layer: int | None
    shape: Sizes
    type: str
    bytes: int


@dataclass(frozen=True)
class Body:
    """What the file of one shape holds: the host, the shape with the host's zero-padding, and every tensor."""

    host: Host
    held: ModelShape
    tensors: tuple[Stored, ...]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.bytes for tensor in self.tensors)

    @property
    def matrices(self) -> tuple[Stored, ...]:
        """Tensors that the engine multiplies with; a token embedding that is only looked up is none."""
        return tuple(t for t in self.tensors if len(t.shape) > 1 and t.kind != "token_embd")


class Family:
    """The models that one parent can be cut to, as shapes: faster than a `draft` of each, and equal to it in effect."""

    def __init__(self, ir: ModelIR) -> None:
        """Take from the parent which vectors (norms, biases) a layer has, and which host holds even and uneven shapes.

        Raises:
            AccError: LC001 if no host holds the family.
        """
        family = FAMILIES.get(ir.family)
        if family is None:
            choose(ir, 1).require()
            raise AccError.of("LC001", ir.family, "acc knows no llama.cpp architecture that holds this family")
        self.name, self.depth = ir.family, ir.depth()
        self._own, self._uneven = HOSTS[family.own], HOSTS.get(family.uneven)
        self._wide = tuple(
            ir.dims[f"ffn.{index}"].size if f"ffn.{index}" in ir.dims else 0 for index in range(self.depth)
        )
        self._even = choose(ir.resize({}), 32).host
        self._vectors = _vectors(ir)

    @lru_cache(maxsize=4096)  # noqa: B019 - a family lives as long as its cost model
    def body(self, shape: ModelShape, quant: str) -> Body:
        """The file that a shape is lowered to.

        Raises:
            ValueError: the shape has another depth than the parent.
        """
        if len(shape.layers) != self.depth:
            raise ValueError(
                f"the shape has {len(shape.layers)} layers and the parent {self.depth}; dropped ones count"
            )
        host = self._own if shape.uniform and not self._needs_uneven(shape) else self._uneven or self._own
        held = self._held(shape, host, types.mix(quant).block)
        return Body(host, held, tuple(self._tensors(held, host, quant)))

    def _needs_uneven(self, shape: ModelShape) -> bool:
        return self._own.square and any(
            layer.heads * shape.head_dim != shape.hidden for layer in shape.layers if not layer.dropped
        )

    def _held(self, shape: ModelShape, host: Host, block: int) -> ModelShape:
        """The shape with what `hosts.hold` pads, in numbers."""
        layers = list(shape.layers)
        present = [index for index, layer in enumerate(layers) if not layer.dropped]
        for index in present:
            layer = layers[index]
            if not layer.ffn:
                layer = replace(layer, ffn=min(block if block > 1 else 32, self._wide[index]))
            if not layer.heads and (index == present[0] or not host.no_attention):
                layer = replace(layer, heads=1, kv_heads=1)
            layers[index] = layer
        if not host.per_layer:
            kv = max(layers[i].kv_heads for i in present)
            queries = max(layers[i].heads // layers[i].kv_heads for i in present)
            widest = LayerShape(kv * queries, kv, max(layers[i].ffn for i in present))
            layers = [LayerShape(0, 0, 0) if layer.dropped else widest for layer in layers]
        return replace(shape, layers=tuple(layers))

    def _tensors(self, held: ModelShape, host: Host, quant: str) -> Iterator[Stored]:
        tied = held.tied and not (self.name == "granite" and host.arch == "deci")
        yield _stored("output", None, (held.vocab, held.hidden), quant, self.depth)
        if not tied:
            yield _stored("token_embd", None, (held.vocab, held.hidden), quant, self.depth)
        yield _stored("output_norm", None, (held.hidden,), quant, self.depth)
        for index, layer in enumerate(held.layers):
            if layer.dropped:
                continue
            sizes = {"q": layer.heads * held.head_dim, "kv": layer.kv_heads * held.head_dim, "head": held.head_dim}
            sizes |= {"hidden": held.hidden, "ffn": layer.ffn}
            for kind, rows, columns in _matrices(held, layer, host):
                yield _stored(kind, index, (rows, columns), quant, self.depth)
            for kind, size in self._vectors:
                if layer.heads or not kind.startswith("attn"):
                    yield _stored(kind, index, (sizes[size],), quant, self.depth)


def _matrices(held: ModelShape, layer: LayerShape, host: Host) -> Iterator[tuple[str, int, int]]:
    """Kind, rows and columns of a layer's matrices."""
    query, key = layer.heads * held.head_dim, layer.kv_heads * held.head_dim
    if layer.heads and (host.packed or "attn_qkv" in host.fused):
        yield "attn_qkv", query + 2 * key, held.hidden
    elif layer.heads:
        yield from (("attn_q", query, held.hidden), ("attn_k", key, held.hidden), ("attn_v", key, held.hidden))
    if layer.heads:
        yield "attn_output", held.hidden, query
    if host.packed:
        yield "ffn_up", 2 * layer.ffn, held.hidden
    else:
        yield from (("ffn_gate", layer.ffn, held.hidden), ("ffn_up", layer.ffn, held.hidden))
    yield "ffn_down", held.hidden, layer.ffn


@lru_cache(maxsize=65536)
def _stored(kind: str, layer: int | None, shape: Sizes, quant: str, depth: int) -> Stored:
    name = "F32"
    if len(shape) > 1:
        name = types.stored(types.wanted(quant, kind, shape[-1], layer, depth), shape[-1])
    weights, size = types.block(name)
    return Stored(kind, layer, shape, name, math.prod(shape) // weights * size)


def _vectors(ir: ModelIR) -> tuple[tuple[str, str], ...]:
    """The vectors of one layer of the parent: `attn` or `ffn` with the size that they follow."""
    found = []
    first = next((d.name.partition(".")[2] for d in ir.select("layer")), "0")
    for tensor in ir.tensors.values():
        if f"layer.{first}" not in tensor.presence or len(tensor.axes) != 1:
            continue
        block = "attn" if any(name.startswith("attn.") for name in tensor.presence) else "ffn"
        for segment in tensor.axes[0]:
            roles = [ir.dims[name].role for name in segment]
            size = "q" if "q_per_kv" in roles else "kv" if "kv_group" in roles else "ffn" if "ffn" in roles else ""
            found.append((block, size or ("hidden" if "hidden" in roles else "head")))
    return tuple(found)


# Amounts -------------------------------------------------------------------------------------------------------------


def decode_work(body: Body, depth: float, batch: int = 1, cache: float = math.inf, threads: int = 1) -> Work:
    """What one decoding step does: one token of each of `batch` requests that hold `depth` tokens each.

    Args:
        cache: bytes that stay in the processor's caches from step to step; what is read beyond them is spilled.
        threads: of a CPU, which wait for the busiest of them; 1 where work is spread evenly.
    """
    work: Counter[str] = Counter()
    for matrix in body.matrices:
        work[f"read.{matrix.type}"] += matrix.bytes
        work["rows"] += matrix.shape[0] * batch
    work["cache"] = round(body.held.head_dim * _attended(body, depth, batch, threads))
    work["spill"] = round(max(0.0, _streamed(body) + batch * depth * body.held.kv_bytes_per_token() - cache))
    return {**work, **_entered(body, 1)}


def prefill_work(body: Body, prompt: int, ubatch: int, cache: float = math.inf) -> Work:
    """What a prompt on an empty cache does; the output matrix multiplies the last token alone. `cache` as above."""
    graphs = -(-prompt // ubatch)
    work: Counter[str] = Counter()
    for matrix in body.matrices:
        if matrix.kind == "output":
            work[f"read.{matrix.type}"] += matrix.bytes
        else:
            work[f"multiply.{matrix.type}"] += prompt * math.prod(matrix.shape)
            work["rows"] += prompt * matrix.shape[0]
    layers = [layer for layer in body.held.layers if not layer.dropped]
    heads = body.held.head_dim * sum(layer.heads for layer in layers)
    # Activations between the matrices: norms and residuals, the gate, rotary embedding.
    work["elements"] = prompt * (2 * body.held.hidden * len(layers) + sum(layer.ffn for layer in layers) + heads)
    work["scores"] = heads * sum(
        min(ubatch, prompt - start) * (start + min(ubatch, prompt - start)) for start in range(0, prompt, ubatch)
    )
    work["spill"] = round(graphs * max(0.0, _streamed(body) - cache))
    return {**work, **_entered(body, graphs)}


def _attended(body: Body, depth: float, batch: int, threads: int) -> float:
    """Cached tokens times heads that a step attends to, as if every thread had as many as the busiest one.

    ggml (flash attention in `ops.cpp`) shares the padded cells of a lone long request out among the threads, of which
    the last may find few that are in use, and otherwise the heads: nine heads keep two threads as busy as ten.
    """
    heads = [layer.heads for layer in body.held.layers if layer.heads]
    cells = CELLS * math.ceil((depth + 1) / CELLS)
    if batch == 1 and cells >= SPLIT_CELLS:
        return threads * sum(heads) * min(depth, math.ceil(cells / threads))
    return threads * depth * sum(math.ceil(count * batch / threads) for count in heads)


def _streamed(body: Body) -> int:
    """Bytes of weights that every graph reads from end to end."""
    return sum(matrix.bytes for matrix in body.matrices)


def _entered(body: Body, times: int) -> Work:
    """Sub-blocks entered, each some twenty graph nodes, and the call itself."""
    layers = [layer for layer in body.held.layers if not layer.dropped]
    attention, ffn = sum(layer.heads > 0 for layer in layers), sum(layer.ffn > 0 for layer in layers)
    return {"attention": times * attention, "ffn": times * ffn, "calls": times}
