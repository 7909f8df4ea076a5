"""From block scores and a budget to an architecture: the integer program, corrected until the cost model agrees."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from acc.diag import Diagnostic, NoArchFits
from acc.passes.search import program
from acc.passes.search.evolve import Picked
from acc.passes.search.limits import Budget, Linear, figure, linear
from acc.passes.search.space import SIZES, Choice, Space
from acc.target import Limit, LimitName

ROUNDS = 6
"""Programs at most per architecture; sums over layers are corrected by what the cost model says of the last one."""
TIGHTER = 1e-3
"""Where a solution comes back although it breaks a limit, that limit's sum is raised by this fraction more."""


def best(budget: Budget, space: Space, hidden: int, score: Callable[[int, Choice], float], most: int) -> Picked | None:
    """The architecture with the least sum of scores that keeps every limit in the cost model; None if none was found.

    Args:
        most: layers that may be dropped.
    """
    loads = linear(budget, space, space.whole, hidden)
    scores = [[score(index, choice) for choice in choices] for index, choices in enumerate(space.layers)]
    gone = [[float(choice.dropped) for choice in choices] for choices in space.layers]
    shift = [0.0] * len(budget.limits)
    found: Picked | None = None
    seen: set[Picked] = set()
    for _ in range(ROUNDS):
        room = [budget.ceiling(limit) - loads.base[at] - shift[at] for at, limit in enumerate(budget.limits)]
        index = program.solve(scores, [*loads.tables, gone], [*room, most])
        if index is None:
            break
        picked = tuple(choices[at] for choices, at in zip(space.layers, index, strict=True))
        if budget.fits(picked, hidden):
            found = _better(found, picked, score)
        if picked in seen and found:
            break
        shift = _shifted(budget, loads, picked, index, hidden, shift, again=picked in seen)
        seen.add(picked)
    return found


def _better(old: Picked | None, new: Picked, score: Callable[[int, Choice], float]) -> Picked:
    def total(picked: Picked) -> float:
        return sum(score(index, choice) for index, choice in enumerate(picked))

    return new if old is None or total(new) < total(old) else old


def _shifted(
    budget: Budget,
    loads: Linear,
    picked: Picked,
    index: Sequence[int],
    hidden: int,
    shift: Sequence[float],
    *,
    again: bool,
) -> list[float]:
    """What to add to the sum of each limit so that it says of this architecture what the cost model says."""
    costs = budget.costs(picked, hidden)
    found = []
    for at, limit in enumerate(budget.limits):
        load = budget.load(costs, limit.name)
        over = load > budget.ceiling(limit)
        found.append(shift[at] + TIGHTER * load if again and over else load - loads.total(at, index))
    return found


def restrictions(space: Space) -> Iterator[Space]:
    """The space itself, or where layers must choose alike one space for every combination of sizes."""
    roles = sorted(space.uniform)
    sizes = [sorted({SIZES[role](choice) for choice in space.layers[0]} - {0}, reverse=True) for role in roles]
    for combination in itertools.product(*sizes):
        narrowed = space
        for role, size in zip(roles, combination, strict=True):
            narrowed = narrowed.restricted(role, size)
        yield narrowed


def droppable(space: Space, depth: float) -> int:
    """How many layers may be dropped if a share `depth` of them must stay."""
    return int(len(space.layers) * (1 - depth) + 1e-9)


def cheapest(budget: Budget, space: Space, hidden: int, most: int, limit: LimitName) -> Picked | None:
    """The architecture with the least load of one limit."""
    loads = linear(budget, space, space.whole, hidden)
    at = next(number for number, one in enumerate(budget.limits) if one.name == limit)
    gone = [[float(choice.dropped) for choice in choices] for choices in space.layers]
    index = program.solve(loads.tables[at], [gone], [most])
    return None if index is None else tuple(c[i] for c, i in zip(space.layers, index, strict=True))


def no_fit(budget: Budget, space: Space, depth: float, where: str) -> NoArchFits:
    """The limit that binds, and the architecture that comes nearest."""
    most = droppable(space, depth)
    candidates: list[tuple[dict[LimitName, float], Picked, int]] = []
    for hidden in space.hidden:
        for narrowed in restrictions(space):
            for limit in budget.limits:
                picked = cheapest(budget, narrowed, hidden, most, limit.name)
                if picked:
                    candidates.append((budget.excess(picked, hidden), picked, hidden))
    excess, picked, hidden = min(candidates, key=lambda one: max(one[0].values()))
    limit = max(budget.limits, key=lambda one: excess[one.name])
    value = budget.careful(figure(budget.costs(picked, hidden), limit.name))
    message = (
        f"no architecture keeps {limit.name} {limit}: the nearest ({described(picked, hidden)}) is predicted at "
        f"{Limit(limit.name, value)} with its margin, {excess[limit.name]:.1%} over"
    )
    hint = f"loosen {limit.name}, or widen the search: smaller `depth`, more `hidden`, another number format"
    return NoArchFits(Diagnostic("ACC433", where or "puzzle", message, hint))


def refuse_hopeless(budget: Budget, space: Space, depth: float, where: str) -> None:
    """Stop before any scoring where even the cheapest architecture of all breaks a limit. Raises NoArchFits."""
    most = droppable(space, depth)
    for limit in budget.limits:
        picks = (
            (cheapest(budget, narrowed, hidden, most, limit.name), hidden)
            for hidden in space.hidden
            for narrowed in restrictions(space)
        )
        if all(picked is None or budget.excess(picked, hidden)[limit.name] > 0 for picked, hidden in picks):
            raise no_fit(budget, space, depth, where)


def described(picked: Picked, hidden: int) -> str:
    """An architecture in a few words."""
    kept = [choice for choice in picked if not choice.dropped]
    widths = [choice.ffn for choice in kept if choice.ffn]
    ffn = f"FFN {min(widths, default=0)} to {max(widths, default=0)}"
    return f"hidden {hidden}, {len(kept)} of {len(picked)} layers, {ffn}"
