"""Tables and JSON of what commands have to say: dims, checks, benches, lists of what is installed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from acc import pipeline, registry, targetfiles
from acc.console import say, table
from acc.diag import AccError, Diagnostic
from acc.quantity import written
from acc.target import LIMIT_UNITS

if TYPE_CHECKING:
    from acc.backend_api import Check, LoweringPlan
    from acc.ir import Dim, ModelIR
    from acc.target import Target

Listing = tuple[Sequence[str], Sequence[Sequence[str]], list[Diagnostic]]


def dims(ir: ModelIR) -> None:
    """The dims, those that differ only by their layer in one row."""
    grouped: dict[tuple[str, str, str, str, str], list[Dim]] = defaultdict(list)
    for dim in ir.dims.values():
        name = dim.name.rpartition(".")[0] + ".*" if dim.layer is not None else dim.name
        size = str(dim.size) if ir.size(dim.name) == dim.size else f"{ir.size(dim.name)} of {dim.size}"
        grouped[name, dim.role, size, dim.state, dim.why].append(dim)
    rows = [(name, role, _layers(found), size, state, why) for (name, role, size, state, why), found in grouped.items()]
    table(("dim", "role", "layers", "size", "state", "why"), rows)
    say(f"{ir.family}: {ir.parameters():,} parameters in {len(ir.tensors)} tensors, {len(ir.ops)} ops traced")


def dims_json(ir: ModelIR) -> dict[str, Any]:
    """The same for tools, one entry per dim."""
    entries = [{**vars(dim), "kept": ir.size(dim.name)} for dim in ir.dims.values()]
    return {"family": ir.family, "parameters": ir.parameters(), "dims": entries}


def check(found: Check, plan: LoweringPlan, target: Target) -> None:
    """Host, size, bits per weight, types, grid."""
    counts: dict[tuple[str, str], list[int]] = defaultdict(list)
    for tensor in plan.tensors:
        counts[tensor.type, tensor.wanted].append(tensor.bytes)
    rows = [
        (kind, len(sizes), written(sum(sizes), "B"), "" if kind == wanted else f"asked for {wanted}")
        for (kind, wanted), sizes in sorted(counts.items(), key=lambda item: -sum(item[1]))
    ]
    table(("type", "tensors", "size", ""), rows)
    grids = [
        (g.role, g.step, g.minimum, "one size for all layers" if g.uniform else "", g.why) for g in found.grid.values()
    ]
    table(("dim", "step", "least", "", "why"), grids)
    print(f"{target.quant} as {plan.host}: {plan.file_bytes:,} bytes, {plan.bits_per_weight:.2f} bits per weight")


def check_json(found: Check, plan: LoweringPlan) -> dict[str, Any]:
    """The same for tools."""
    return {
        "host": plan.host,
        "file_bytes": plan.file_bytes,
        "bits_per_weight": plan.bits_per_weight,
        "tensors": [vars(tensor) for tensor in plan.tensors],
        "fallbacks": [tensor.name for tensor in plan.fallbacks],
        "grid": {role: vars(grid) for role, grid in found.grid.items()},
        "diagnostics": [vars(one) for one in (*found.diagnostics, *plan.notes)],
    }


def bench(facts: Mapping[str, Any]) -> None:
    """Medians of parent and child, their ratio, and the rounds behind them."""
    rows = []
    for name, unit in LIMIT_UNITS.items():
        parent, child = facts["parent"][name], facts["child"][name]
        rounds = facts["child"]["rounds"].get(name, ())
        spread = f"{written(min(rounds), unit)} to {written(max(rounds), unit)}" if rounds else ""
        rows.append((name, written(parent, unit), written(child, unit), f"{child / parent:.3f}x", len(rounds), spread))
    table(("", "parent", "bundle", "ratio", "rounds", "bundle, all rounds"), rows)


def facts(found: Mapping[str, Any]) -> None:
    """The facts of a pass, one per line; lists of records as tables."""
    for name, value in found.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            table(tuple(value[0]), [[_cell(cell) for cell in row.values()] for row in value], title=name)
        else:
            print(f"{name}: {_cell(value)}")


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _layers(found: Sequence[Dim]) -> str:
    numbers = sorted(dim.layer for dim in found if dim.layer is not None)
    if not numbers:
        return ""
    whole = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]} to {numbers[-1]}" if whole and len(numbers) > 1 else ", ".join(map(str, numbers))


def _registered(found: registry.Registry[Any]) -> Listing:
    rows = [
        (name, entry.value, f"{entry.dist.name} {entry.dist.version}" if entry.dist else "")
        for name, entries in found.entries().items()
        for entry in entries
    ]
    return ("name", "class", "package"), rows, found.collisions()


def _passes() -> Listing:
    return _registered(registry.passes())


def _backends() -> Listing:
    return _registered(registry.backends())


def _options() -> Listing:
    """Every pass with its options; imports them."""
    rows: list[tuple[str, str, str, str]] = []
    faults = registry.passes().collisions()
    for name in registry.passes().names():
        try:
            cls = registry.passes().load(name)
        except AccError as error:
            faults += [one for one in error.diagnostics if one.code != "ACC302"]
            continue
        options = pipeline.defaults(cls)
        rows.append((name, str(cls.kind), (cls.__doc__ or "").strip().split("\n")[0], ", ".join(options)))
    return ("pass", "kind", "", "options"), rows, faults


def _targets() -> Listing:
    found = targetfiles.installed()
    rows = [
        (name, one.device, one.engine, one.workload, one.quant, _here(found.device.get(one.device)))
        for name, one in found.target.items()
    ]
    return ("target", "device", "engine", "workload", "quant", "this machine"), rows, targetfiles.faults()


def _devices() -> Listing:
    rows = [
        (name, str(one.kind), one.memory or "detected", one.bandwidth or "detected", one.source)
        for name, one in targetfiles.installed().device.items()
    ]
    return ("device", "kind", "memory", "bandwidth", "source"), rows, targetfiles.faults()


def _workloads() -> Listing:
    rows = [
        (name, str(one.prompt), str(one.output), str(one.batch), str(one.context or one.prompt + one.output))
        for name, one in targetfiles.installed().workload.items()
    ]
    return ("workload", "prompt", "output", "batch", "context"), rows, targetfiles.faults()


def _efforts() -> Listing:
    return ("effort", "pipeline"), [*pipeline.efforts().items()], []


def _here(device: targetfiles.DeviceTable | None) -> str:
    return "yes" if device and targetfiles.is_here(device) else "no: estimated"


LISTS: dict[str, Callable[[], Listing]] = {
    "targets": _targets,
    "passes": _passes,
    "backends": _backends,
    "options": _options,
    "devices": _devices,
    "workloads": _workloads,
    "efforts": _efforts,
}
