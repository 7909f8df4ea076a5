"""Say whether a bundle keeps its limits as measured: exit code 0 if it does, 1 if not. Used by `make demo` and CI."""

from __future__ import annotations

import sys
from pathlib import Path

from acc.report.data import read


def main(bundle: Path) -> int:
    """Print one line per limit and return the exit code."""
    report = read(bundle / "report.json")
    for line in report.limits:
        figure = line.measured
        held = figure is not None and line.verdict == "kept"
        told = f"{figure.value:.6g} {figure.unit}" if figure else "not measured"
        limit = f"{line.limit.value:.6g}" if line.limit else "unresolved"
        print(f"{'kept  ' if held else 'BROKEN'} {line.asked.name}: measured {told}, limit {limit}")
    unproved = [parity.artifact for parity in report.parity if not parity.passed]
    print(f"parity: {'failed for ' + ', '.join(unproved) if unproved else f'{len(report.parity)} artifacts'}")
    measured = all(line.measured is not None for line in report.limits)
    return 0 if report.verdict == "kept" and measured and report.parity and not unproved else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
