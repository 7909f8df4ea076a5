"""Limits against a cost model: resolved, with margins, and as sums over layers for the integer program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from acc.backend_api import CostModel
from acc.cost import Costs, Figure
from acc.diag import AccError
from acc.ir import ModelShape
from acc.passes.search.space import Choice, Space, model_shape
from acc.target import Limit, LimitName, Workload

NAMES: tuple[LimitName, ...] = ("ttft", "tpot", "throughput", "memory")


@dataclass(frozen=True)
class Budget:
    """The limits of one search, absolute, and the model that says what things cost.

    Attributes:
        parent: the whole model in numbers.
        known: predictions so far.
        margin: what a prediction must stay below its limit, as a fraction; the figure's own band if that is smaller.
    """

    model: CostModel
    workload: Workload
    parent: ModelShape
    limits: tuple[Limit, ...]
    margin: float
    known: dict[ModelShape, Costs] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls, model: CostModel, workload: Workload, parent: ModelShape, limits: Sequence[Limit], margin: float
    ) -> Budget:
        """Resolve relative limits by the parent's predicted costs. Raises AccError ACC432 without any limit."""
        if not limits:
            hint = "give the pass or the target one, such as `tpot=0.7x`"
            raise AccError.of("ACC432", "limits", "there is no limit, so there is nothing to search for", hint)
        whole = model.predict(parent, workload)
        resolved = tuple(limit.resolve(figure(whole, limit.name).value) for limit in limits)
        return cls(model, workload, parent, resolved, margin)

    def costs(self, choices: Sequence[Choice], hidden: int) -> Costs:
        """What the cost model says of an architecture."""
        shape = model_shape(self.parent, choices, hidden)
        if shape not in self.known:
            self.known[shape] = self.model.predict(shape, self.workload)
        return self.known[shape]

    def excess(self, choices: Sequence[Choice], hidden: int) -> dict[LimitName, float]:
        """By what fraction each limit is broken, margin included; at most 0 where it is kept."""
        costs = self.costs(choices, hidden)
        return {limit.name: limit.violation(self.careful(figure(costs, limit.name))) for limit in self.limits}

    def fits(self, choices: Sequence[Choice], hidden: int) -> bool:
        """Whether every limit is kept with its margin."""
        return max(self.excess(choices, hidden).values()) <= 0

    def careful(self, found: Figure) -> float:
        """The figure moved by its margin to the bad side."""
        margin = min(self.margin, found.error) if found.error else 0.0
        return found.value * (1 - margin if found.unit == "tok/s" else 1 + margin)

    def load(self, costs: Costs, name: LimitName) -> float:
        """A cost as something that adds up over layers: throughput as seconds per token."""
        value = self.careful(figure(costs, name))
        return 1 / value if name == "throughput" else value

    def ceiling(self, limit: Limit) -> float:
        """The most load that a limit allows."""
        return 1 / limit.value if limit.name == "throughput" else limit.value


@dataclass(frozen=True)
class Linear:
    """Loads as a base and a sum over layers: exact for one changed layer at a time, close for many.

    Attributes:
        base: load of the whole model at this hidden size, by limit.
        tables: change of load by limit, layer and choice.
    """

    base: tuple[float, ...]
    tables: tuple[tuple[tuple[float, ...], ...], ...]

    def total(self, at: int, picked: Sequence[int]) -> float:
        """The load that the sum gives for one limit."""
        return self.base[at] + sum(table[index] for table, index in zip(self.tables[at], picked, strict=True))


def linear(budget: Budget, space: Space, around: Sequence[Choice], hidden: int) -> Linear:
    """Difference the cost model: each layer's choices one at a time, the other layers as in `around`."""
    base = budget.costs(around, hidden)
    rows: list[list[list[float]]] = [[] for _ in budget.limits]
    for index, choices in enumerate(space.layers):
        changed = [
            budget.costs([*around[:index], choice, *around[index + 1 :]], hidden) if choice != around[index] else base
            for choice in choices
        ]
        for at, limit in enumerate(budget.limits):
            rows[at].append([budget.load(costs, limit.name) - budget.load(base, limit.name) for costs in changed])
    return Linear(
        tuple(budget.load(base, limit.name) for limit in budget.limits),
        tuple(tuple(tuple(row) for row in table) for table in rows),
    )


def figure(costs: Costs, name: LimitName) -> Figure:
    """One of the four figures."""
    found: Figure = getattr(costs, name)
    return found
