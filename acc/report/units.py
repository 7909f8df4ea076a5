"""How numbers are written for people: one place, so that every form of the report says them alike."""

from __future__ import annotations

from acc.cost import Figure
from acc.quantity import written
from acc.target import LIMIT_UNITS, Limit

COST_NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "throughput": "throughput",
    "memory": "memory",
}


def size(count: float) -> str:
    """Bytes with a binary prefix."""
    return written(count, "B")


def duration(seconds: float) -> str:
    """How long work took."""
    if seconds < 120:
        return written(seconds, "s")
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 120 else f"{seconds / 3600:.1f} h"


def count(number: float) -> str:
    """A number of things: exact below a million, then in millions or billions."""
    if number < 1e6:
        return f"{number:,.0f}"
    return f"{number / 1e6:.1f} M" if number < 1e9 else f"{number / 1e9:.2f} B"


def figure(number: Figure | None) -> str:
    """A figure with its band; a dash where there is none. The provenance is shown beside it, not in it."""
    if number is None:
        return "–"
    percent = 100 * number.error
    band = f" ± {percent:.{0 if percent >= 10 else 1}f} %" if number.error else ""
    return written(number.value, number.unit) + band


def ratio(number: Figure | None, base: Figure | None) -> str:
    """A figure as a multiple of another."""
    return f"{number.value / base.value:.2f}x" if number and base and base.value else ""


def limit(asked: Limit) -> str:
    """A limit as it was asked for: `at most 0.7x`, `at least 900 tok/s`."""
    side = "at least" if asked.name == "throughput" else "at most"
    return f"{side} {bound(asked)}"


def bound(limit: Limit | None) -> str:
    """The number of a limit alone; a dash where it could not be resolved."""
    if limit is None:
        return "–"
    return f"{limit.value:g}x" if limit.relative else written(limit.value, LIMIT_UNITS[limit.name])
