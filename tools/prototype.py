"""One-shot pruning under the protocol of the prototype, with the product's passes: perplexity at uniform FFN widths.

Calibration: 32 x 512 tokens; evaluation: 24 x 512 tokens of other files; both of the Python standard library, its
`Lib/*.py` shuffled with seed 0: the first 40 files for calibration, from the 100th on for evaluation; float32. The
ridge of the refit is chosen on 8 x 512 tokens of the files between. Use:

    python tools/prototype.py MODEL [--widths 1280 1024 768] [--library LIB] [--write docs/results/prototype.md]

The prototype's figures are of the library of Python 3.11.7; `--library` names one beside the running Python's.
"""

from __future__ import annotations

import argparse
import datetime
import random
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from acc import checkpoint, machine, model
from acc.ir import Arch, Artifact, ModelIR
from acc.passes.analysis import calibrate
from acc.passes.analysis.order import Order
from acc.passes.library import Library
from acc.passes.masked import Masked
from acc.passes.moments import Moments
from acc.passes.quality import perplexity
from acc.passes.streaming import batches
from acc.passes.transform.refit import Refit, refitted
from acc.passes.transform.slice import read_orders, with_kept
from acc.passes_api import Context
from acc.trace import trace

LENGTH, CALIBRATION, CHECK, EVALUATION = 512, 32, 8, 24
LIBRARY = Path(sysconfig.get_paths()["stdlib"])
BEST = {1280: 2.68, 1024: 2.86, 768: 3.27}
"""The best row of the prototype (its table in the research notes)."""


def samples(tokenizer: Any, files: Sequence[Path], count: int) -> torch.Tensor:
    """The first `count` samples of some files' text."""
    tokens: list[int] = []
    for file in files:
        tokens += tokenizer(file.read_text("utf-8", errors="replace"))["input_ids"]
        if len(tokens) >= count * LENGTH:
            return torch.tensor(tokens[: count * LENGTH]).reshape(count, LENGTH)
    raise SystemExit(f"{len(files)} files hold fewer than {count} samples")


def shuffled(library: Path) -> list[Path]:
    """The modules of a standard library in the order of the protocol."""
    files = sorted(library.glob("*.py"))
    random.Random(0).shuffle(files)
    return files


class Trial:
    """The parent calibrated under the protocol, and the perplexity of what is cut from it."""

    def __init__(self, folder: Path, scratch: Path, library: Path) -> None:
        opened = checkpoint.Checkpoint.at(folder)
        tokenizer, files = opened.tokenizer(), shuffled(library)
        self.fit = samples(tokenizer, files[:40], CALIBRATION)
        self.check = samples(tokenizer, files[40:100], CHECK)
        self.judge = samples(tokenizer, files[100:], EVALUATION)
        own = Artifact(str(folder), "parent")
        self.ir = trace(opened.config).with_artifacts(parent=own)
        self.context = Context(scratch, scratch, ".", None, None, 0, lambda *_: None)
        self.masked = Masked(self.ir, model.load(folder, dtype=torch.float32))
        start = time.monotonic()
        self.moments = calibrate.measure(self.ir, self.masked.model, self.fit, 4, self.context)
        self.seconds = {"calibrate": time.monotonic() - start}
        self.moments.write(scratch / "moments")
        self.ir = self.ir.with_artifacts(moments=Artifact("moments", "moments"))

    def order(self, method: Any) -> Mapping[str, Sequence[int]]:
        """The nested orders of one method."""
        start = time.monotonic()
        Order(method=method).run(self.ir, self.context)
        self.seconds[f"order {method}"] = time.monotonic() - start
        return read_orders(self.context.scratch / "orders")

    def perplexity(self, values: Mapping[str, torch.Tensor]) -> float:
        """Of the parent with some tensors replaced."""
        self.masked.put(values)
        found = perplexity(self.masked.model, batches(self.judge, 4))
        self.masked.restore(values)
        return found

    def cut(self, orders: Mapping[str, Sequence[int]], width: int) -> ModelIR:
        """Every FFN cut to one width."""
        sizes = {dim.name: width for dim in self.ir.select("ffn", free=True)}
        return with_kept(self.ir.with_arch(Arch(sizes)), orders)

    def row(self, orders: Mapping[str, Sequence[int]], width: int, way: str) -> float:
        """Perplexity at a uniform width: `plain`, `one-shot` or `sequential` refit."""
        arch = self.cut(orders, width)
        if way == "plain":
            return self.perplexity(self.masked.cut(arch, Moments(0, {})))
        if way == "one-shot":
            return self.perplexity(Library(self.masked, self.moments, orders).values(arch.arch.sizes))
        start = time.monotonic()
        options = {"gamma": Refit.gamma, "batch": 4}
        found = refitted(arch, self.masked, self.moments, self.fit, self.check, self.context, **options)  # type: ignore[arg-type]
        self.seconds[f"sequential refit, {width}"] = time.monotonic() - start
        return self.perplexity(found.values)


def main() -> None:
    """Print the table; write it with `--write`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--widths", type=int, nargs="+", default=sorted(BEST, reverse=True))
    parser.add_argument("--methods", nargs="+", default=["absmean", "actnorm", "obs"])
    parser.add_argument("--refits", nargs="+", default=["plain", "one-shot", "sequential"])
    parser.add_argument("--library", type=Path, default=LIBRARY)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = checkpoint.open_model(options.model, Path(scratch) / "model").folder
        trial = Trial(folder, Path(scratch), options.library)
        lines = table(trial, options.widths, options.methods, options.refits)
    text = report(options, lines, trial.seconds)
    print(text)
    if options.write:
        options.write.parent.mkdir(parents=True, exist_ok=True)
        options.write.write_text(text, "utf-8")


def table(trial: Trial, widths: Sequence[int], methods: Sequence[str], refits: Sequence[str]) -> list[str]:
    """The rows of the result."""
    lines = [f"| order | refit | {' | '.join(map(str, widths))} |", "| --- " * (2 + len(widths)) + "|"]
    lines.append("| dense | | " + " | ".join([f"{trial.perplexity({}):.3f}"] * len(widths)) + " |")
    for method in methods:
        orders = trial.order(method)
        for way in refits:
            found = [trial.row(orders, width, way) for width in widths]
            lines.append(f"| {method} | {way} | " + " | ".join(f"{value:.3f}" for value in found) + " |")
            print(lines[-1], flush=True)
    known = [f"{BEST[width]:.2f}" if width in BEST else "" for width in widths]
    lines.append("| best of the prototype | one-shot | " + " | ".join(known) + " |")
    return lines


def report(options: argparse.Namespace, lines: Sequence[str], seconds: Mapping[str, float]) -> str:
    """The result as a page of the documentation."""
    took = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
    lists = (("widths", options.widths), ("methods", options.methods), ("refits", options.refits))
    chosen = " ".join(f"--{name} {' '.join(map(str, values))}" for name, values in lists)
    library = "the running Python's library" if options.library == LIBRARY else "`--library LIB`, another Python's"
    return "\n".join(
        [
            "# One-shot pruning of SmolLM2-135M, no training",
            "",
            "Perplexity on Python code with every FFN (of 1536) cut to one width; protocol: `tools/prototype.py`.",
            "`plain`: columns cut. `one-shot`: least squares on the parent's moments. `sequential`: the pass `refit`,",
            "which chooses each ridge on other tokens. Nothing is trained.",
            "",
            *lines,
            "",
            f"Command: `python tools/prototype.py {Path(options.model).name} {chosen}`, {library}; {took}.",
            f"Machine: {machine.processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}; "
            f"{datetime.date.today().isoformat()}.",
            "",
        ]
    )


if __name__ == "__main__":
    main()
