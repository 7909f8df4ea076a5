"""From samples to rates: time = sum over classes of work of amount / rate, by non-negative least absolute errors.

A class of work is whatever a backend counts (bytes of one number format read, multiplications, blocks entered); it
knows what its engine does, this module does not. The fit minimises *relative* errors, so that a small model counts as
much as a large one, and no rate can be negative, so that a prediction outside the samples stays sensible.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

REWEIGHTED = 15
"""Times that errors are weighed anew; the solution moves by less than a thousandth after ten."""
CLOSE = 0.01
"""Relative errors below this count alike: no sample is better than that."""

Work = Mapping[str, float]
"""Amount per class of work, e.g. `{"read.Q8_0": 1.4e8, "layers": 30}`."""


@dataclass(frozen=True)
class Rates:
    """Seconds per unit of each class of work.

    Attributes:
        error: p90 of the absolute relative error on samples whose group was left out of the fit.
        residual: mean of the absolute relative error on the samples themselves.
    """

    seconds: Mapping[str, float]
    error: float
    residual: float

    def predict(self, work: Work) -> float:
        """Seconds that the work takes; a class that was not fitted counts nothing (see `unknown`)."""
        return sum(self.seconds.get(name, 0.0) * amount for name, amount in work.items())

    def unknown(self, work: Work) -> tuple[str, ...]:
        """Classes of some work that the samples had none of, so that a prediction leaves them out."""
        return tuple(sorted(name for name, amount in work.items() if amount and name not in self.seconds))


def fit(works: Sequence[Work], seconds: Sequence[float], groups: Sequence[Hashable], ridge: float = 1e-2) -> Rates:
    """Fit rates to measured work.

    Args:
        works: of each sample.
        seconds: measured, of each sample.
        groups: what a sample was measured on (its probe); the error is that of predicting a whole group left out.
        ridge: weight that pulls all rates towards each other's share of the time, for classes that samples hardly tell
            apart; a fraction of the samples' own weight.
    """
    import numpy as np

    names = sorted({name for work in works for name, amount in work.items() if amount})
    amounts = np.array([[work.get(name, 0.0) for name in names] for work in works])
    measured = np.array(seconds)
    scale = amounts.max(axis=0)
    relative = amounts / scale / measured[:, None]
    share = _solve(relative, ridge)
    left_out = []
    for group in dict.fromkeys(groups):
        out = np.array([other == group for other in groups])
        if out.all():
            continue
        left_out.append(np.abs(relative[out] @ _solve(relative[~out], ridge) - 1))
    error = float(np.quantile(np.concatenate(left_out), 0.9)) if left_out else 1.0
    residual = float(np.mean(np.abs(relative @ share - 1)))
    return Rates(dict(zip(names, (share / scale).tolist(), strict=True)), error, residual)


def choose(works: Sequence[Sequence[Work]], count: int, first: int = 0) -> list[int]:
    """Which of many candidate probes to measure: greedily those that tell the most about the rates (D-optimal design).

    Args:
        works: per candidate, the work of each sample that it would give.
        count: how many to choose.
        first: a candidate that is always in.

    Returns:
        Indices of the chosen candidates, most telling first.
    """
    import numpy as np

    names = sorted({name for probe in works for work in probe for name in work})
    rows = [np.array([[work.get(name, 0.0) for name in names] for work in probe]) for probe in works]
    scale = np.maximum(np.max(np.concatenate(rows), axis=0), 1e-300)
    # Relative errors count: every sample is divided by its size.
    rows = [(row / scale) / np.maximum((row / scale).sum(axis=1, keepdims=True), 1e-300) for row in rows]
    information = 1e-6 * np.eye(len(names)) + rows[first].T @ rows[first]
    chosen = [first]
    while len(chosen) < min(count, len(works)):
        inverse = np.linalg.inv(information)
        # log det(M + RᵀR) - log det M = log det(I + R M⁻¹ Rᵀ)
        gains = [np.linalg.slogdet(np.eye(len(row)) + row @ inverse @ row.T)[1] for row in rows]
        for taken in chosen:
            gains[taken] = -np.inf
        chosen.append(int(np.argmax(gains)))
        information = information + rows[chosen[-1]].T @ rows[chosen[-1]]
    return chosen


def _solve(relative: np.ndarray, ridge: float) -> np.ndarray:
    """Non-negative x with relative @ x near 1, drawn weakly to an even share of the time.

    Least absolute errors, by least squares that are weighted by the errors of the solution before: a sample that was
    disturbed does not pull at the others.
    """
    import numpy as np

    solution = _least_squares(relative, ridge, np.ones(len(relative)))
    for _ in range(REWEIGHTED):
        weights = 1 / np.maximum(np.abs(relative @ solution - 1), CLOSE)
        solution = _least_squares(relative, ridge, weights / weights.mean())
    return solution


def _least_squares(relative: np.ndarray, ridge: float, weights: np.ndarray) -> np.ndarray:
    """Non-negative x of least sum of weights * (relative @ x - 1)², drawn weakly to an even share of the time."""
    import numpy as np
    from scipy.optimize import nnls

    count, classes = relative.shape
    mean = np.maximum(relative.mean(axis=0), 1e-300)
    # In units of each class's mean share, an even split is 1 / classes.
    pull = np.sqrt(ridge * count) * np.eye(classes)
    root = np.sqrt(weights)
    matrix = np.concatenate([relative / mean * root[:, None], pull])
    wanted = np.concatenate([root, pull @ np.full(classes, 1 / classes)])
    solution: np.ndarray = nnls(matrix, wanted)[0] / mean
    return solution
