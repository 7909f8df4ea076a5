"""Evolution on whole-model KL: one layer gets less, another more, the limits stay kept (EvoPress, arXiv 2410.14649)."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from acc.passes.search.space import Choice, Space

Picked = tuple[Choice, ...]
DRAWS = 64
"""Mutations drawn for one trial; the one that the block scores like best is tried."""
STRIKES = 3
"""Trials better on the scoring tokens and worse on the others after which evolution only overfits."""


@dataclass(frozen=True)
class Evolved:
    """The best architecture found, its KL on the scoring and on the validation tokens, how many trials were made and
    why it ended."""

    picked: Picked
    kl: float
    check: float
    trials: int
    ended: str


def evolve(
    start: Picked,
    space: Space,
    *,
    fits: Callable[[Picked], bool],
    score: Callable[[int, Choice], float],
    judge: Callable[[Picked], float],
    check: Callable[[Picked], float],
    trials: int,
    seed: int,
    progress: Callable[[int, int, str], None],
) -> Evolved:
    """Improve an architecture by level switches.

    Args:
        fits: whether an architecture keeps every limit.
        score: the block score of a choice of a layer, by which mutations are ranked before they are tried.
        judge, check: KL on the scoring tokens, and on others: what improves only the first is refused.
    """
    random_ = random.Random(seed)
    best, kl, held = start, judge(start), check(start)
    seen, strikes, trial = {start}, 0, 0
    while trial < trials and strikes < STRIKES:
        found = _mutation(best, space, seen, fits, score, random_)
        if found is None:
            return Evolved(best, kl, held, trial, "no further mutation keeps the limits")
        trial += 1
        progress(trial, trials, "evolve")
        seen.add(found)
        value = judge(found)
        if value >= kl:
            continue
        other = check(found)
        if other >= held:
            strikes += 1
            continue
        best, kl, held = found, value, other
    ended = "validation tokens got worse" if strikes >= STRIKES else "all trials made"
    return Evolved(best, kl, held, trial, ended)


def _mutation(
    best: Picked,
    space: Space,
    seen: set[Picked],
    fits: Callable[[Picked], bool],
    score: Callable[[int, Choice], float],
    random_: random.Random,
) -> Picked | None:
    """An architecture two layers away that keeps the limits; of those drawn the one with the least block scores."""
    candidates: dict[Picked, float] = {}
    for _ in range(DRAWS):
        mutant = list(best)
        change = 0.0
        for index in random_.sample(range(len(best)), min(2, len(best))):
            mutant[index] = random_.choice(space.layers[index])
            change += score(index, mutant[index]) - score(index, best[index])
        picked = tuple(mutant)
        if picked not in seen and picked not in candidates and fits(picked):
            candidates[picked] = change
    return min(candidates, key=candidates.__getitem__) if candidates else None
