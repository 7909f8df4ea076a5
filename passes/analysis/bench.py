"""Parent and child in the engine, in turns, under the target's workload: what the limits are judged by."""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from acc.backend_api import Measured, Session
from acc.cost import throughput
from acc.diag import AccError
from acc.fingerprint import code_digest
from acc.ir import Arch, ModelIR
from acc.passes_api import Context, Pass, PassResult

if TYPE_CHECKING:
    from acc.target import Target


class Bench(Pass):
    """Measure TTFT, TPOT, throughput and memory of the artifact beside its parent's, and judge the limits by them.

    The parent is lowered in the same number format, once per store.

    Options:
        rounds: of each model, in turns; medians are told, and every round is kept.
    """

    name = "bench"
    kind = "analysis"
    needs = ("gguf", "parent")
    cached = False
    measures = True
    rounds: int = 5

    def run(self, ir: ModelIR, ctx: Context) -> PassResult:
        """Change nothing.

        Facts: `parent` and `child` as `Measured`, their `ratio` per cost, and per limit what was asked, what it comes
        to, what was measured, whether it is kept and by which fraction it is broken.
        """
        target, backend = ctx.target, ctx.backend
        if target is None or backend is None:
            raise AccError.of(
                "ACC603", "bench", "there is no engine to measure", "name a target: `--target cpu-llamacpp`"
            )
        if self.rounds < 1:
            raise AccError.of("ACC312", "bench", "`rounds` must be at least 1", "five are a good number")
        files = (self._parent(ir, ctx), ctx.path(ir.artifacts[backend.artifact]))
        workload = target.workload
        with ExitStack() as stack:
            sessions = [
                stack.enter_context(backend.open(file, target, context=workload.held, batch=workload.batch))
                for file in files
            ]
            rounds = _in_turns(sessions, target, self.rounds, ctx)
            parent, child = (_measured(one, found, target, ctx) for one, found in zip(sessions, rounds, strict=True))
        facts = {"parent": asdict(parent), "child": asdict(child), "ratio": _ratio(parent, child)}
        return PassResult(ir, {**facts, "limits": limits(target, parent, child)})

    def _parent(self, ir: ModelIR, ctx: Context) -> Path:
        """The parent's artifact in the target's format, made unless the store has it."""
        assert ctx.backend is not None
        assert ctx.target is not None
        whole = ir.artifacts["parent"]
        code = code_digest(type(ctx.backend).__module__)
        told = json.dumps([whole.digest, ctx.target.quant, ctx.target.engine, code])
        folder = ctx.store / f"parent-{hashlib.sha256(told.encode()).hexdigest()[:32]}"
        name = f"model.{ctx.backend.artifact}"
        if not (folder / name).is_file():
            fresh = ctx.scratch / "parent"
            fresh.mkdir(exist_ok=True)
            parent = ir.with_arch(Arch()).with_artifacts(weights=whole)
            ctx.backend.lower(parent, ctx.path(whole), ctx.target.quant, fresh / name, ctx)
            if not folder.exists():
                fresh.rename(folder)
            else:
                (fresh / name).replace(folder / name)
        return folder / name


def _in_turns(sessions: list[Session], target: Target, rounds: int, ctx: Context) -> list[list[tuple[float, float]]]:
    """(TTFT, TPOT) of each round per session; every other round goes backwards, so that drift falls on both."""
    found: list[list[tuple[float, float]]] = [[] for _ in sessions]
    for number in range(rounds):
        order = list(range(len(sessions)))
        for index in order if number % 2 == 0 else reversed(order):
            found[index].append(sessions[index].time(target.workload))
        ctx.progress(number + 1, rounds, "rounds of parent and child")
    return found


def _measured(session: Session, rounds: list[tuple[float, float]], target: Target, ctx: Context) -> Measured:
    """Medians and rounds of one session."""
    assert ctx.backend is not None
    firsts, steps = [first for first, _ in rounds], [step for _, step in rounds]
    batch = target.workload.batch
    memory = session.memory()
    tpot = median(steps)
    return Measured(
        ttft=median(firsts),
        tpot=tpot,
        throughput=throughput(batch, tpot),
        memory=memory["total"],
        rounds={"ttft": firsts, "tpot": steps, "throughput": [throughput(batch, step) for step in steps]},
        engine=getattr(session, "info", None) or ctx.backend.engines()[0],
        details={"memory_bytes": dict(memory), **dict(getattr(session, "details", {}))},
    )


def _ratio(parent: Measured, child: Measured) -> dict[str, float]:
    return {name: getattr(child, name) / getattr(parent, name) for name in ("ttft", "tpot", "throughput", "memory")}


def limits(target: Target, parent: Measured, child: Measured) -> list[dict[str, Any]]:
    """Each limit: as asked, in absolute numbers, the child's measurement, and whether it is kept."""
    told = []
    for limit in target.limits:
        absolute, value = limit.resolve(getattr(parent, limit.name)), getattr(child, limit.name)
        over = absolute.violation(value)
        told.append(
            {
                "limit": limit.name,
                "asked": str(limit),
                "value": absolute.value,
                "measured": value,
                "kept": over <= 0,
                "over": max(over, 0.0),
            }
        )
    return told
