"""What every search under limits shares: its options, the budget that the cost model gives, and what it works with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from acc.diag import AccError
from acc.ir import Arch, ModelIR
from acc.passes.search.evolve import Picked
from acc.passes.search.limits import NAMES, Budget, figure
from acc.passes.search.space import Space, space_of
from acc.passes.search.study import Study
from acc.passes_api import Context, Pass
from acc.target import Limit


class LimitedSearch(Pass):
    """Base of the searches that ask the target's cost model what an architecture costs.

    Options:
        tpot, ttft, memory, throughput: limits in place of the target's, as text: `8ms`, `0.7x`, `6GiB`.
        margin: what predictions must stay below the limits, as a fraction (their own band if that is smaller).
        tokens: to score architectures on.
        length: tokens per sample.
        stride: logits are compared at every so many positions.
        ffn, heads, hidden: how many sizes below the whole one to offer.
        depth: least share of the layers that stays.
        fit: tokens of the refit behind a narrower stream.
        data: text, JSONL or Parquet files; the corpus inside the package if empty.
    """

    kind = "search"
    needs = ("parent", "moments", "orders")

    tpot: str = ""
    ttft: str = ""
    memory: str = ""
    throughput: str = ""
    margin: float = 0.02
    tokens: int = 4096
    length: int = 512
    stride: int = 2
    ffn: int = 8
    heads: int = 3
    hidden: int = 2
    depth: float = 0.6
    fit: int = 16384
    data: tuple[str, ...] = ()

    def limits(self) -> list[Limit]:
        """The limits that were given as options. Raises AccError ACC401 or ACC402."""
        given = {name: getattr(self, name) for name in NAMES}
        return [Limit.parse(name, text, f"{self.name}{{{name}}}") for name, text in given.items() if text]

    def task(self, ir: ModelIR, ctx: Context) -> tuple[Budget, Space]:
        """The limits (the target's, these in place of those of the same name), and the space that the engine allows.

        Raises:
            AccError: ACC432 without any limit, ACC434 without a target.
        """
        if ctx.target is None or ctx.backend is None:
            hint = "give --target; `acc ls targets` lists them"
            raise AccError.of("ACC434", "target", "a search under limits needs a target and its engine", hint)
        target = ctx.target.with_limits(self.limits())
        table = ir.artifacts.get("table")
        model = ctx.backend.cost_model(ctx.path(table) if table else None, ir, target)
        budget = Budget.of(model, target.workload, ir.with_arch(Arch()).model_shape(), target.limits, self.margin)
        grid = ctx.backend.check(ir, target).grid
        return budget, space_of(ir, grid, ffn=self.ffn, heads=self.heads, hidden=self.hidden)

    def study(self, ir: ModelIR, ctx: Context) -> Study:
        """The parent in memory, with the samples that architectures are scored on."""
        return Study.of(
            ir, ctx, tokens=self.tokens, length=self.length, stride=self.stride, fit=self.fit, data=self.data
        )


def told(budget: Budget, picked: Picked, hidden: int) -> Mapping[str, Any]:
    """Each limit, what is predicted of parent and child, and the room that is left, as a fraction."""
    whole, cut = budget.model.predict(budget.parent, budget.workload), budget.costs(picked, hidden)
    excess = budget.excess(picked, hidden)
    return {
        limit.name: {
            "limit": limit.value,
            "parent": figure(whole, limit.name).value,
            **asdict(figure(cut, limit.name)),
            "room": -excess[limit.name],
        }
        for limit in budget.limits
    }
