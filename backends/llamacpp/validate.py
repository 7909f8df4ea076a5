"""How far predictions are off: random architectures that no fit has seen, measured as a bench measures them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from acc.backends.llamacpp.cost import LlamaCppCostModel, cost_model
from acc.backends.llamacpp.draws import Draws
from acc.backends.llamacpp.measure import WARMING_STEPS, Record, Schedule, run, timing
from acc.backends.llamacpp.plan import check
from acc.backends.llamacpp.profile import plan_key
from acc.cost import CostTable
from acc.ir import Arch
from acc.validation import Comparison, ValidationResult

if TYPE_CHECKING:
    from acc.ir import ModelIR
    from acc.passes_api import Context
    from acc.target import Target

SEED = 7919
"""Held-out architectures are drawn apart from the candidates of the profile."""


def validate(ir: ModelIR, target: Target, ctx: Context, table: Path, count: int = 10) -> ValidationResult:
    """Measure `count` random heterogeneous architectures that are not among the table's, and compare.

    Every model is opened and timed on the target's whole workload, in interleaved rounds. Seconds are told as in the
    table (`measure.timing`).
    """
    parent = ir.with_arch(Arch())
    held_out = held_out_models(parent, target, CostTable.load(table), ctx.seed, count)
    workload = target.workload
    steps = max(workload.output - WARMING_STEPS, 4)
    schedule = Schedule((workload.prompt,), steps, rounds=5, most_rounds=12)
    record = Record(ctx.scratch / "validation.jsonl", plan_key(held_out, schedule, target))
    run(held_out, schedule, target, record, ctx.progress)
    model = cost_model(table, parent, target)
    assert isinstance(model, LlamaCppCostModel)
    rows = []
    for name, one in held_out.items():
        found = timing(record.of(name), schedule.prompts)
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
    return ValidationResult(tuple(rows), datetime.now(UTC).isoformat(timespec="seconds"))


def held_out_models(parent: ModelIR, target: Target, table: CostTable, seed: int, count: int) -> Mapping[str, ModelIR]:
    """Random architectures that are neither the parent nor in the table."""
    draws = Draws(parent, check(parent, target).grid, seed + SEED)
    known = {sample.shape for sample in table.samples}
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
