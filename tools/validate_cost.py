"""Validate the cost model on this machine and write what was found to `docs/results/`.

    python tools/validate_cost.py MODEL [--target cpu-llamacpp] [--quant q4_k_m --quant q8_0] [--count 10] [--seed 0]

Measures (or resumes measuring) a cost table per number format, then random heterogeneous architectures outside the
fit, and writes predicted beside measured. The machine should do nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from acc import machine, registry, targetfiles
from acc.compile import backend_of
from acc.manager import Instrument, PassManager, Stage
from acc.parent import open_parent
from acc.store import Store
from acc.validation import COSTS, markdown

RESULTS = Path(__file__).parent.parent / "docs" / "results"


class Told(Instrument):
    """Progress on standard error."""

    def progress(self, stage: Stage, step: int, total: int, what: str) -> None:
        print(f"\r{stage.one.name}: {step}/{total} {what}    ", end="", file=sys.stderr, flush=True)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--target", default="cpu-llamacpp")
    parser.add_argument("--quant", action="append")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--store", type=Path, default=Path("~/.cache/acc-validation").expanduser())
    given = parser.parse_args()
    for quant in given.quant or ["q4_k_m", "q8_0"]:
        with Store(given.store) as store:
            target = targetfiles.load(given.target, quant=quant, cache_file=store.root / "machine.json")
            profile = registry.passes().load("profile")
            manager = PassManager(store, target, backend_of(target), given.seed, [Told()])
            validating = dataclasses.replace(profile(), validate=True, count=given.count)
            run = manager.run([validating], open_parent(given.model, store).ir)
        RESULTS.mkdir(parents=True, exist_ok=True)
        name = RESULTS / f"cost-{given.target}-{quant}.md"
        name.write_text(page(run.records[-1].facts, given.target, quant, Path(given.model).name, given.seed), "utf-8")
        print(f"\n{name}", file=sys.stderr)


def page(facts: Mapping[str, Any], target: str, quant: str, model: str, seed: int) -> str:
    """The page of one number format: how it was measured, what was found, and what the residual is made of."""
    made = facts["provenance"]
    details = made["details"]
    chosen = ["--target", target, "--quant", quant, "--seed", str(seed)]
    command = shlex.join(["python", "tools/validate_cost.py", model, *chosen])
    spreads = {cost: median(row[f"{cost}_spread"] for row in facts["models"]) for cost in COSTS}
    return f"""# Cost model of {target} at {quant}, validated

`{command}`, {made["date"][:10]}, {machine.processor()}, {made["threads"]} threads, {platform.system()};
{made["engine"]} {made["engine_version"]} ({details["origin"]}; {made["build"]}). It took {made["seconds"]:.0f} s:
{details["visits"]} visits of probe models, {details["visits_quiet"]} undisturbed by other programs; half the
distance between the quartiles of a sample's rounds is {made["noise"]:.1%} of it (median).

Random heterogeneous architectures that the fit has not seen, measured end to end:

{markdown(facts)}

Of the errors above, the measurements' own spread between rounds is {spreads["ttft"]:.1%} (TTFT) and
{spreads["tpot"]:.1%} (TPOT), median over the models.
"""


if __name__ == "__main__":
    main()
