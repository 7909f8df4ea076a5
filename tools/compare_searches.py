"""Compare searches at equal limits: the same parent, calibration, cost table and refit, and only the search differs.

    python tools/compare_searches.py MODEL --table TABLE [--target T] [--tpot 0.7x] [--memory 0.8x] [--rows NAME ...]
                                     [--write docs/results/search.md]

TABLE is what `acc profile --export` wrote for the target. Quality is measured in float32 on held-out text that no pass
has seen. Finished rows are kept in the store and not computed again.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from acc import machine, pipeline, targetfiles
from acc.compile import backend_of, with_table
from acc.manager import Instrument, PassManager, Stage
from acc.parent import open_parent
from acc.quantity import written
from acc.store import Store
from acc.target import Limit

BEFORE, AFTER = "calibrate,order{order}", "slice,refit,quality{tokens=16384}"
ROWS = {
    "one FFN width": ("", "minitron{depth=1.0,heads=0,hidden=0,ffn=24,compared=1}"),
    "minitron": ("{method=absmean}", "minitron"),
    "minitron, acc's order": ("", "minitron"),
    "puzzle of quick": ("", "puzzle{tokens=1024,stride=4,ffn=5,heads=0,widths=1,hidden=0,evolve=8}"),
    "puzzle": ("", "puzzle"),
    "puzzle, this width": ("", "puzzle{hidden=0}"),
}


class Told(Instrument):
    """Progress on standard error."""

    def progress(self, stage: Stage, step: int, total: int, what: str) -> None:
        print(f"\r{stage.one.name}: {step}/{total} {what}    ", end="", file=sys.stderr, flush=True)


def main() -> None:
    """Run the rows and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--target", default="cpu-llamacpp")
    parser.add_argument("--tpot", default="0.7x")
    parser.add_argument("--memory", default="0.8x")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--store", type=Path, default=Path("~/.cache/acc-searches").expanduser())
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    lines = [
        "| search | architecture | parameters | predicted TPOT | memory | perplexity | KL (nats) | search tokens | s |",
        "| --- " * 9 + "|",
    ]
    for name in given.rows:
        lines.append(row(name, given))
        print(f"\n{lines[-1]}", flush=True)
    text = page(given, lines)
    print(text)
    if given.write:
        given.write.write_text(text, "utf-8")


def row(name: str, given: argparse.Namespace) -> str:
    """Run one search with what comes before and after it."""
    order, search = ROWS[name]
    text = ",".join((BEFORE.format(order=order), search, AFTER))
    with Store(given.store) as store:
        limits = [Limit.parse("tpot", given.tpot, "--tpot"), Limit.parse("memory", given.memory, "--memory")]
        target = targetfiles.load(given.target, cache_file=store.root / "machine.json").with_limits(limits)
        manager = PassManager(store, target, backend_of(target), 0, [Told()])
        run = manager.run(pipeline.parse(text), with_table(open_parent(given.model, store).ir, given.table))
    stages = {record.stage.one.kind: record for record in run.records}
    found, quality = stages["search"], run.records[-1].facts["quality"][-1]
    predicted = found.facts["predicted"]
    shape = run.ir.model_shape()
    present = [layer for layer in shape.layers if not layer.dropped]
    widths = [layer.ffn for layer in present]
    heads = [layer.heads for layer in present]
    per_layer = f"FFN {min(widths)}-{max(widths)}, heads {min(heads)}-{max(heads)}"
    cells = [
        name,
        f"hidden {shape.hidden}, {len(present)} layers, {per_layer}",
        f"{run.ir.parameters() / 1e6:.1f} M",
        written(predicted["tpot"]["value"], "s"),
        written(predicted["memory"]["value"], "B"),
        f"{quality['perplexity']:.1f}",
        f"{quality['kl_nats']:.3f}",
        f"{found.facts['tokens_spent']:,}",
        f"{found.seconds:.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def page(given: argparse.Namespace, lines: list[str]) -> str:
    """The page of the documentation."""
    recipes = "\n".join(f"- {name}: `order{order or '{}'}`, `{search}`" for name, (order, search) in ROWS.items())
    made: Mapping[str, Any] = {"model": Path(given.model).name, "target": Path(given.target).stem}
    return f"""# Searches at equal limits

{made["model"]} for {made["target"]}, TPOT {given.tpot}, memory {given.memory} of the parent's (predicted, the same
cost table for all); the same calibration, refit and held-out text (16,384 tokens); no training.

{chr(10).join(lines)}

{recipes}

`python tools/compare_searches.py {made["model"]} --table TABLE --tpot {given.tpot} --memory {given.memory}`,
{datetime.date.today().isoformat()}, {machine.processor()}, {torch.get_num_threads()} threads, {platform.system()}.
"""


if __name__ == "__main__":
    main()
