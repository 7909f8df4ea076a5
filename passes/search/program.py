"""One choice per group, the least sum of scores, every limit kept: a multiple-choice knapsack, solved by HiGHS."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

SECONDS = 30.0
"""Longest time for one program; the best choice found by then is taken."""


def solve(
    scores: Sequence[Sequence[float]], costs: Sequence[Sequence[Sequence[float]]], budgets: Sequence[float]
) -> list[int] | None:
    """The chosen index of each group, or None if nothing keeps the budgets.

    Args:
        scores: [groups][choices], lower is better.
        costs: [budgets][groups][choices].
        budgets: what the sum of costs over groups may be at most; costs are scaled by them, so any unit will do.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    groups = np.repeat(np.arange(len(scores)), [len(group) for group in scores])
    count = len(groups)
    one_each = csr_array((np.ones(count), (groups, np.arange(count))), shape=(len(scores), count))
    constraints = [LinearConstraint(one_each, 1, 1)]
    for table, budget in zip(costs, budgets, strict=True):
        row = np.concatenate([np.asarray(group, dtype=float) for group in table])
        scale = max(abs(budget), float(np.abs(row).max()), 1e-300)
        constraints.append(LinearConstraint(row[None, :] / scale, -np.inf, budget / scale))
    objective = np.concatenate([np.asarray(group, dtype=float) for group in scores])
    found = milp(
        objective / max(float(np.abs(objective).max()), 1e-300),
        constraints=constraints,
        integrality=np.ones(count),
        bounds=Bounds(0, 1),
        options={"time_limit": SECONDS, "mip_rel_gap": 0.0},
    )
    if found.x is None:
        return None
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    return [int(np.argmax(part)) for part in np.split(found.x, starts[1:])]
