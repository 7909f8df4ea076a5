"""Predicted against measured on models outside the fit: signed errors, median, p90, rank correlation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from acc.cost import Validation

COSTS = ("ttft", "tpot", "memory")
UNITS = {"ttft": "s", "tpot": "s", "memory": "B"}


@dataclass(frozen=True)
class Comparison:
    """One model: predicted and measured by cost (seconds, bytes), and the relative spread of the measured rounds."""

    model: str
    described: str
    predicted: Mapping[str, float]
    measured: Mapping[str, float]
    spread: Mapping[str, float]

    def error(self, cost: str) -> float:
        """The signed relative error: above 0 where the prediction is too high."""
        return self.predicted[cost] / self.measured[cost] - 1


@dataclass(frozen=True)
class Summary:
    """Errors of one cost over all models: absolute median, p90 and worst, signed mean, Spearman's rank."""

    median: float
    p90: float
    worst: float
    bias: float
    rank: float


@dataclass(frozen=True)
class ValidationResult:
    """What a validation found."""

    rows: tuple[Comparison, ...]
    date: str

    def summary(self, cost: str) -> Summary:
        """The errors of one cost."""
        import numpy as np
        from scipy.stats import spearmanr

        signed = np.array([row.error(cost) for row in self.rows])
        off = np.abs(signed)
        predicted = [row.predicted[cost] for row in self.rows]
        measured = [row.measured[cost] for row in self.rows]
        ranked = len({*predicted}) > 1 and len({*measured}) > 1
        rank = float(spearmanr(predicted, measured).statistic) if ranked else 1.0
        return Summary(
            float(np.median(off)), float(np.quantile(off, 0.9)), float(off.max()), float(signed.mean()), rank
        )

    def validation(self) -> Validation:
        """What a cost table keeps of it."""
        found = {cost: self.summary(cost) for cost in COSTS}
        return Validation(
            len(self.rows),
            {cost: one.median for cost, one in found.items()},
            {cost: one.p90 for cost, one in found.items()},
            self.date,
        )

    def to_json(self) -> dict[str, Any]:
        """Records for reports: one per model and cost, and the summary per cost."""
        models = [
            {
                "model": row.model,
                "architecture": row.described,
                **{
                    f"{cost}_{what}": value
                    for cost in COSTS
                    for what, value in (
                        ("predicted", row.predicted[cost]),
                        ("measured", row.measured[cost]),
                        ("error", row.error(cost)),
                        ("spread", row.spread[cost]),
                    )
                },
            }
            for row in self.rows
        ]
        return {"models": models, "errors": [{"cost": cost, **vars(self.summary(cost))} for cost in COSTS]}


def markdown(found: Mapping[str, Any]) -> str:
    """The records of `ValidationResult.to_json` as two tables for people."""
    lines = ["| architecture | " + " | ".join(f"{cost} predicted | measured | error" for cost in COSTS) + " |"]
    lines.append("| --- " * (1 + 3 * len(COSTS)) + "|")
    for row in found["models"]:
        cells = []
        for cost in COSTS:
            scale, unit = (1e3, "ms") if UNITS[cost] == "s" else (2.0**-20, "MiB")
            cells += [f"{scale * row[f'{cost}_{side}']:.2f} {unit}" for side in ("predicted", "measured")]
            cells.append(f"{row[f'{cost}_error']:+.1%}")
        lines.append(f"| {row['architecture']} | " + " | ".join(cells) + " |")
    lines += ["", "| cost | median | p90 | worst | mean signed | Spearman |", "| --- " * 6 + "|"]
    for one in found["errors"]:
        shares = [f"{one[name]:.1%}" for name in ("median", "p90", "worst")]
        lines.append(f"| {one['cost']} | " + " | ".join(shares) + f" | {one['bias']:+.1%} | {one['rank']:.3f} |")
    return "\n".join(lines)
