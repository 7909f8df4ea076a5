"""What a search may choose: per decoder layer, sizes that the engine runs on its fast path; and sizes of the stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from acc.backend_api import Grid
from acc.ir import Dim, LayerShape, ModelIR, ModelShape, Role

LEAST_HIDDEN = 0.7
"""Share of the residual stream that must stay: below it a cut without training leaves too little."""


@dataclass(frozen=True, order=True)
class Choice:
    """What is kept of one layer: KV groups and queries per group (0, 0: no attention), FFN width (0: no MLP)."""

    groups: int
    queries: int
    ffn: int

    @property
    def attention(self) -> tuple[int, int]:
        return self.groups, self.queries

    @property
    def dropped(self) -> bool:
        """Whether nothing is left."""
        return not self.groups and not self.ffn

    @property
    def shape(self) -> LayerShape:
        """The layer in numbers."""
        return LayerShape(self.groups * self.queries, self.groups, self.ffn)


SIZES: Mapping[Role, Callable[[Choice], int]] = {
    "ffn": lambda choice: choice.ffn,
    "kv_group": lambda choice: choice.groups,
    "q_per_kv": lambda choice: choice.queries,
}
"""The size that a choice gives to each per-layer role."""


@dataclass(frozen=True)
class Space:
    """The choices of a search.

    Attributes:
        layers: the choices of each layer; the whole layer is the first one.
        hidden: sizes of the residual stream, the whole one first.
        uniform: roles for which all layers must choose alike.
    """

    layers: tuple[tuple[Choice, ...], ...]
    hidden: tuple[int, ...]
    uniform: frozenset[Role]

    @property
    def whole(self) -> tuple[Choice, ...]:
        """The parent."""
        return tuple(choices[0] for choices in self.layers)

    def restricted(self, role: Role, size: int) -> Space:
        """The space in which every layer has one size of a role."""
        of = SIZES[role]
        layers = tuple(tuple(c for c in choices if c.dropped or of(c) == size) for choices in self.layers)
        return replace(self, layers=layers)


def space_of(ir: ModelIR, grid: Mapping[Role, Grid], *, ffn: int, heads: int, hidden: int) -> Space:
    """The space of a model in an engine.

    Args:
        grid: from `Backend.check`; a role that it does not name may take any size.
        ffn, heads, hidden: how many sizes below the whole one to offer per FFN, per attention, and of the stream
            (there the largest ones).
    """

    def sizes(dim: Dim, count: int) -> list[int]:
        return on_grid(dim, grid.get(dim.role, Grid(dim.role)), count)

    def may_drop(role: Role, index: int) -> bool:
        dim = ir.dims[f"{role}.{index}"]
        return dim.state == "free" and grid.get(role, Grid(role, minimum=0)).minimum == 0

    layers = []
    for index in range(ir.depth()):
        groups, queries = ir.dims[f"kv_group.{index}"], ir.dims[f"q_per_kv.{index}"]
        attention = [(g, q) for g in sizes(groups, heads) for q in sizes(queries, heads)]
        if may_drop("attn", index):
            attention.append((0, 0))
        widths = sizes(ir.dims[f"ffn.{index}"], ffn) + ([0] if may_drop("mlp", index) else [])
        choices = [Choice(*a, w) for a in attention for w in widths]
        droppable = ir.dims[f"layer.{index}"].state == "free"
        choices = [choice for choice in choices if not choice.dropped] + ([Choice(0, 0, 0)] if droppable else [])
        layers.append(tuple(choices))
    stream = ir.select("hidden")[0]
    widths = on_grid(stream, grid.get("hidden", Grid("hidden")), stream.size)  # a step of 1 would offer every size
    narrow = [size for size in widths[1:] if size >= LEAST_HIDDEN * stream.size][:hidden]
    uniform = frozenset(role for role, rule in grid.items() if rule.uniform and role in SIZES)
    return Space(tuple(layers), (stream.size, *narrow), uniform)


def on_grid(dim: Dim, grid: Grid, count: int) -> list[int]:
    """The whole size, then up to `count` smaller ones on the grid, evenly spread, falling."""
    if dim.state != "free":
        return [dim.size]
    step, least = max(1, grid.step), max(1, grid.minimum)
    below = [size for size in range(step, dim.size, step) if size >= least][::-1]
    if len(below) > count:
        below = [below[round((at + 1) * len(below) / count) - 1] for at in range(count)]
    return [dim.size, *below]


def model_shape(parent: ModelShape, choices: Sequence[Choice], hidden: int) -> ModelShape:
    """The model in numbers."""
    return replace(parent, hidden=hidden, layers=tuple(choice.shape for choice in choices))


def sizes_of(ir: ModelIR, choices: Sequence[Choice], hidden: int) -> dict[str, int]:
    """The sizes of the dims that differ from the traced model's."""
    sizes: dict[str, int] = {}
    for index, choice in enumerate(choices):
        sizes |= layer_sizes(ir, index, choice)
    stream = ir.select("hidden")[0]
    return sizes | ({stream.name: hidden} if hidden != stream.size else {})


def layer_sizes(ir: ModelIR, index: int, choice: Choice) -> dict[str, int]:
    """The sizes of the dims of one layer that differ from the traced model's."""
    if choice.dropped:
        return {f"layer.{index}": 0}
    sizes = {f"attn.{index}": 0} if not choice.groups else {}
    if choice.groups:
        sizes |= {f"kv_group.{index}": choice.groups, f"q_per_kv.{index}": choice.queries}
    sizes |= {f"ffn.{index}": choice.ffn} if choice.ffn else {f"mlp.{index}": 0}
    return {name: size for name, size in sizes.items() if size != ir.dims[name].size}
