"""Quantities as people write them: `8ms`, `6GiB`, `900tok/s`, `0.7x`; to numbers and back."""

from __future__ import annotations

import re

from acc.diag import AccError

_SCALES: dict[str, dict[str, float]] = {
    "s": {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0},
    "tok/s": {"tok/s": 1.0, "tokens/s": 1.0, "t/s": 1.0, "ktok/s": 1e3},
    "B": {
        "B": 1.0,
        **{f"{prefix}B": 1000.0**power for power, prefix in enumerate("kMGT", 1)},
        **{f"{prefix}iB": 1024.0**power for power, prefix in enumerate("KMGT", 1)},
    },
    "B/s": {f"{prefix}B/s": 1000.0**power for power, prefix in enumerate(("", "k", "M", "G", "T"))},
    "FLOP/s": {f"{prefix}FLOP/s": 1000.0**power for power, prefix in enumerate(("", "k", "M", "G", "T", "P"))},
}
_EXAMPLES = {"s": "8ms", "tok/s": "900tok/s", "B": "6GiB", "B/s": "672GB/s", "FLOP/s": "30TFLOP/s"}
_NUMBER = re.compile(r"\s*(?P<number>[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)\s*(?P<unit>\S*)\s*")


def quantity(text: str, unit: str, where: str, *, relative: bool = False) -> tuple[float, bool]:
    """The value of a quantity in `unit`, and whether it is relative (`0.7x`).

    Args:
        unit: `s`, `tok/s`, `B`, `B/s` or `FLOP/s`.
        where: the option or the key that it was given for.
        relative: whether `0.7x` is allowed.

    Raises:
        AccError: ACC401 if it cannot be read or has another unit, ACC402 if it is not positive.
    """
    scales = _SCALES[unit]
    match = _NUMBER.fullmatch(text)
    written = match["unit"] if match else ""
    if match is None or not (written in scales or (written == "x" and relative)):
        examples = f"`{_EXAMPLES[unit]}`" + (" or `0.7x` (of the parent)" if relative else "")
        known = ", ".join(scales)
        problem = f"`{text}` has no unit" if match and not written else f"cannot read `{text}`"
        raise AccError.of("ACC401", where, problem, f"write it like {examples}; units: {known}")
    value = float(match["number"])
    if not 0 < value < float("inf"):
        problem = "is not more than zero" if value <= 0 else "is not a finite number above zero"
        raise AccError.of("ACC402", where, f"`{text}` {problem}", "nothing can keep such a limit")
    return value * (1.0 if written == "x" else scales[written]), written == "x"


def written(value: float, unit: str) -> str:
    """A value in `unit` as people write it: three significant digits, the scale that fits."""
    if unit == "B":
        scales = {name: scale for name, scale in _SCALES["B"].items() if name == "B" or "i" in name}
    elif unit == "s":
        scales = {name: _SCALES["s"][name] for name in ("ns", "us", "ms", "s")}
    else:
        scales = {unit: 1.0} if unit == "tok/s" else _SCALES[unit]
    name, scale = next(iter(scales.items()))
    for candidate, size in scales.items():
        if abs(value) >= size:
            name, scale = candidate, size
    number = f"{value / scale:.3g}"
    if "e" in number:
        number = f"{value / scale:.0f}"
    return f"{number}{'' if name[0].isdigit() else ' '}{name}"
