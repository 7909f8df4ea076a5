"""Rewrite the golden dumps of tests/ir from what the trace derives now; look at the diff before you commit it."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

IR_TESTS = Path(__file__).parent.parent / "tests" / "ir"


def golden(variant: str) -> str:
    """What is compared: dims and tensors, without configuration and graph, which change with every Transformers."""
    from tiny_configs import traced  # type: ignore[import-not-found, unused-ignore]

    from acc import text

    return text.format(dataclasses.replace(traced(variant), config={}), ops=False)


def main() -> None:
    """Write one file per variant."""
    sys.path.insert(0, str(IR_TESTS))
    from tiny_configs import VARIANTS  # type: ignore[import-not-found, unused-ignore]

    for variant in VARIANTS:
        path = IR_TESTS / "golden" / f"{variant}.acc"
        path.parent.mkdir(exist_ok=True)
        path.write_text(golden(variant), "utf-8")
        print(path)


if __name__ == "__main__":
    main()
