"""Random architectures of a family on the engine's grid: candidates for probes, and held-out models for validation."""

from __future__ import annotations

import random
from collections.abc import Mapping

from acc.backend_api import Grid
from acc.ir import ModelIR, ModelShape, Role

ONE: Grid = Grid("other")
COARSE = 64
"""Hidden sizes off the grid in these steps serve as probes: the parent itself may be off it."""


class Draws:
    """A source of random heterogeneous architectures of one parent."""

    def __init__(self, ir: ModelIR, grid: Mapping[Role, Grid], seed: int) -> None:
        self._ir, self._grid, self._random = ir, grid, random.Random(seed)

    def draw(self) -> ModelIR:
        """One architecture: a hidden size, a depth, and per layer its width, heads and whether a sub-block is there.

        Sizes lie between a quarter (hidden: a half) of the parent's and all of it. Layers are more alike in some draws
        than in others, as they are in what a search finds.
        """
        ir, pick = self._ir, self._random
        sizes = {dim.name: pick.choice(self._hidden(dim.size)) for dim in ir.select("hidden", free=True)}
        depth = ir.depth()
        absent = set(pick.sample(range(depth), pick.randint(0, depth // 3)))
        drops = pick.choice((0.0, 0.05, 0.15))
        floor = pick.choice((0.25, 0.25, 0.5, 0.75))
        uneven = self._may_differ()
        shared: dict[str, int] = {}
        for layer in range(depth):
            if layer in absent and f"layer.{layer}" in ir.dims and len(absent) < depth:
                sizes[f"layer.{layer}"] = 0
            roles: tuple[Role, ...] = ("ffn", "kv_group", "q_per_kv")
            for role in roles:
                dim = ir.dims.get(f"{role}.{layer}")
                if dim is None or dim.state != "free":
                    continue
                choices = self._choices(role, dim.size, floor)
                sizes[dim.name] = pick.choice(choices) if uneven else shared.setdefault(role, pick.choice(choices))
            for block in ("attn", "mlp"):
                if uneven and f"{block}.{layer}" in ir.dims and pick.random() < drops:
                    sizes[f"{block}.{layer}"] = 0
        return self._whole(sizes)

    def _whole(self, sizes: dict[str, int]) -> ModelIR:
        """The model of these sizes; its first layer is kept whole if nothing else is left of it."""
        drawn = self._ir.resize({name: size for name, size in sizes.items() if name in self._ir.dims})
        shape = drawn.model_shape()
        if all(layer.dropped for layer in shape.layers):
            return self._ir
        return drawn

    def _may_differ(self) -> bool:
        grid = self._grid.get("ffn", ONE)
        return not grid.uniform

    def _choices(self, role: Role, size: int, floor: float) -> list[int]:
        grid = self._grid.get(role, ONE)
        least = max(grid.minimum, floor * size)
        return sorted({*(n for n in range(grid.step, size + 1, grid.step) if n >= least), size})

    def _hidden(self, size: int) -> list[int]:
        grid = self._grid.get("hidden", ONE)
        on_grid = [n for n in range(grid.step, size, grid.step) if n >= size / 2]
        between = [n for n in range(COARSE, size, COARSE) if n >= size / 2] if len(on_grid) < 4 else []
        return sorted({*on_grid, *between, size, size - size % 32})


def shape_key(shape: ModelShape) -> str:
    """A text that names a shape, for records."""
    layers = ";".join(f"{layer.heads},{layer.kv_heads},{layer.ffn}" for layer in shape.layers)
    return f"{shape.hidden}|{shape.vocab}|{shape.head_dim}|{int(shape.tied)}|{layers}"
