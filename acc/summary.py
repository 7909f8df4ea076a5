"""The report of a compile, filled from what its turns left.

Any pass may put into its facts `quality` and `parity` (lists of the fields of `acc.report.data.Quality` and `Parity`)
and `notes` (lists of the fields of `Diagnostic`); they reach the report unchanged.
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, TypeAdapter

from acc import __version__, machine, pipeline
from acc.diag import Diagnostic
from acc.fingerprint import LIBRARIES, version
from acc.report.data import Attempt, Machine, Parity, Quality, Report, Side, Stage, limit_lines

if TYPE_CHECKING:
    from acc.compile import Compilation, Turn
    from acc.manager import Run, StageRecord
    from acc.parent import Parent

T = TypeVar("T", bound=BaseModel)


def report_of(compilation: Compilation, turn: Turn, artifact: Path) -> Report:
    """The report of the turn that kept the limits.

    Args:
        artifact: the file of the bundle that the engine loads.
    """
    request, backend = compilation.request, compilation.backend
    target, ir, origin = request.target, turn.run.ir, compilation.parent.ir
    measured = turn.measured or (None, None)
    plans = [backend.plan(one, target.quant) for one in (origin, ir)]
    parent = Side.of(request.model, origin, target.quant, plans[0], predicted=turn.predicted[0], measured=measured[0])
    child = Side.of(
        request.out.name,
        ir,
        target.quant,
        plans[1],
        file=artifact,
        predicted=turn.predicted[1],
        measured=measured[1],
    )
    found = backend.check(ir, target).diagnostics
    served = backend.serve(request.out / artifact.name, target)
    return Report(
        command=request.command,
        model=request.model,
        family=ir.family,
        target=target,
        pipeline=pipeline.format(request.passes),
        engine=backend.engine(target),
        parent=parent,
        child=child,
        limits=limit_lines(target.limits, parent, child),
        quality=tuple(_all(turn.run, "quality", Quality)),
        parity=tuple(_all(turn.run, "parity", Parity)),
        attempts=tuple(_attempt(one) for one in compilation.turns[:-1]),
        notes=tuple(dict.fromkeys([*found, *plans[1].notes, *_notes(turn.run)])),
        stages=tuple(stages(compilation.parent, turn.run)),
        machine=this_machine(),
        versions={"acc": __version__, **{name: version(name) for name in LIBRARIES if version(name)}},
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        run=(f'acc run {request.out} "Hello"', *served),
        facts={name: dict(facts) for name, facts in turn.run.facts.items()},
    )


def stages(parent: Parent, run: Run) -> Iterator[Stage]:
    """The trace and the passes, with what they took."""
    yield Stage(
        name="trace",
        spec="trace",
        seconds=parent.trace.seconds,
        peak_memory_bytes=parent.trace.peak_rss_bytes,
        cached=parent.stored,
    )
    yield from (_stage(record) for record in run.records)


def this_machine() -> Machine:
    """The machine that acc runs on."""
    return Machine(
        processor=machine.processor(),
        cores=machine.threads(),
        memory_bytes=machine.memory_bytes(),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        accelerators=machine.gpus(),
    )


def _stage(record: StageRecord) -> Stage:
    return Stage(
        name=record.stage.one.name,
        spec=record.stage.spec,
        seconds=record.seconds,
        peak_memory_bytes=record.peak_rss_bytes,
        cached=record.stored,
    )


def _attempt(turn: Turn) -> Attempt:
    measured = turn.measured[1] if turn.measured else None
    limits = ", ".join(f"{limit.name} {limit}" for limit in turn.limits)
    return Attempt(
        shape=turn.run.ir.model_shape(), predicted=turn.predicted[1], measured=measured, note=f"searched for {limits}"
    )


def _all(run: Run, kind: str, cls: type[T]) -> Iterator[T]:
    for record in run.records:
        yield from (cls.model_validate(one) for one in record.facts.get(kind, ()))


def _notes(run: Run) -> Iterator[Diagnostic]:
    read: Any = TypeAdapter(Diagnostic).validate_python
    for record in run.records:
        yield from (read(one) for one in record.facts.get("notes", ()))
