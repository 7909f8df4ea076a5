"""How far predictions are off: random architectures that no fit has seen, measured as a bench measures them."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from acc.backends.llamacpp.cost import from_table
from acc.backends.llamacpp.draws import Draws
from acc.backends.llamacpp.measure import Job, Record, Schedule, run, timing
from acc.backends.llamacpp.plan import check
from acc.backends.llamacpp.profile import design, plan_key, schedule_of, table_of
from acc.backends.llamacpp.work import Family
from acc.cost import CostTable
from acc.ir import Arch
from acc.validation import Comparison, ValidationResult

if TYPE_CHECKING:
    from acc.ir import ModelIR, ModelShape
    from acc.passes_api import Context
    from acc.target import Target

SEED = 7919
"""Held-out architectures are drawn apart from the candidates of the profile."""
SECONDS = 300.0
"""Models whose medians are not known well enough are visited again for so long."""


def validate(
    ir: ModelIR, target: Target, ctx: Context, table: CostTable | None, count: int = 10
) -> tuple[CostTable, ValidationResult]:
    """Measure `count` random heterogeneous architectures outside the fit on the target's workload, and compare.

    Without a table, the probes are timed in the same rounds as they are, so that the errors are those of the model and
    not the drift of the machine between two runs. A table from elsewhere is judged with its drift.

    Returns:
        The table that was judged, and what was found.
    """
    parent, started = ir.with_arch(Arch()), time.monotonic()
    probes = {} if table else design(parent, target, ctx.seed)
    known = {sample.shape for sample in table.samples} if table else {one.model_shape() for one in probes.values()}
    held_out = held_out_models(parent, target, known, ctx.seed, count)
    workload = target.workload
    whole = Schedule((workload.prompt,), max(workload.output - 1, 1), warming=0, rounds=5, seconds=SECONDS)
    probing = replace(schedule_of(target), rounds=5, seconds=SECONDS)
    fitted = {name: Job(one, probing) for name, one in probes.items()}
    jobs = {**fitted, **{name: Job(one, whole) for name, one in held_out.items()}}
    record = Record(ctx.scratch / "validation.jsonl", plan_key(jobs, target))
    run(jobs, target, record, ctx.progress)
    table = table or table_of(record, fitted, target, ir.family, time.monotonic() - started)
    model = from_table(table, Family(parent), target, "validation")
    rows = []
    for name, one in held_out.items():
        found = timing(record.of(name), whole.prompts)
        costs = model.predict(one.model_shape(), workload)
        measured = {
            "ttft": found.first[workload.prompt],
            "tpot": found.step[workload.prompt],
            "memory": float(record.memory[name]["total"]),
        }
        predicted = {cost: getattr(costs, cost).value for cost in measured}
        spread = {
            "ttft": found.first_spread[workload.prompt],
            "tpot": found.step_spread[workload.prompt],
            "memory": 0.0,
        }
        rows.append(Comparison(name, told(one), predicted, measured, spread))
    return table, ValidationResult(tuple(rows), datetime.now(UTC).isoformat(timespec="seconds"))


def held_out_models(
    parent: ModelIR, target: Target, shapes: Collection[ModelShape], seed: int, count: int
) -> Mapping[str, ModelIR]:
    """Random architectures that differ from each other and from some shapes."""
    draws = Draws(parent, check(parent, target).grid, seed + SEED)
    known = set(shapes)
    found: dict[str, ModelIR] = {}
    for _ in range(100 * count):
        one = draws.draw()
        shape = one.model_shape()
        if shape not in known and len(found) < count:
            known.add(shape)
            found[f"held-out-{len(found) + 1:02}"] = one
    return found


def told(ir: ModelIR) -> str:
    """An architecture in a few words."""
    shape = ir.model_shape()
    present = [layer for layer in shape.layers if not layer.dropped]
    widths = [layer.ffn for layer in present if layer.ffn]
    heads = [layer.heads for layer in present if layer.heads]
    return (
        f"hidden {shape.hidden}, {len(present)} layers, FFN {min(widths, default=0)} to {max(widths, default=0)}"
        f" ({len(present) - len(widths)} without), heads {min(heads, default=0)} to {max(heads, default=0)}"
        f" ({len(present) - len(heads)} without), {ir.parameters() / 1e6:.1f} M"
    )
