"""The compile driver: from a request to a bundle, with limits that are judged by measurement in the engine."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acc import bundle, pipeline, registry
from acc.console import say, tell
from acc.diag import AccError, Diagnostic, NoArchFits, nearest
from acc.ir import Artifact
from acc.manager import Instrument, PassManager, Run, StageRecord, check_needs
from acc.parent import Parent, open_parent, read_ir
from acc.target import Limit, Target, check_limits

if TYPE_CHECKING:
    from acc.backend_api import Backend, Measured
    from acc.cost import Costs
    from acc.ir import ModelIR
    from acc.passes_api import Pass
    from acc.report.data import Report
    from acc.store import Store

TURNS = 3
"""Searches at most: the first, and those after a measurement that broke a limit."""
TIGHTER = 0.98
"""A limit that is corrected gets tighter by at least 2 %, so that every turn asks for something else."""


@dataclass(frozen=True)
class Request:
    """What one compile is asked for.

    Attributes:
        command: the command line, for the report.
        keep_f16: put the artifact before quantisation into the bundle too.
        rerun: options that say the same target again, for commands that acc proposes.
        table: a cost table from elsewhere, in place of a profile.
    """

    model: str
    target: Target
    passes: tuple[Pass, ...]
    out: Path
    command: str
    seed: int = 0
    keep_f16: bool = False
    rerun: Sequence[str] = ()
    table: Path | None = None


@dataclass(frozen=True)
class Turn:
    """One turn of the closed loop: a run, what was predicted of it, and what the engine showed (None: not here)."""

    run: Run
    limits: tuple[Limit, ...]
    predicted: tuple[Costs, Costs]
    measured: tuple[Measured, Measured] | None
    note: str = ""

    def excess(self, limit: Limit) -> float:
        """How far the measured child breaks a limit as asked, as a fraction of it; at most 0 when it is kept."""
        return excess(limit, self.measured) if self.measured else 0.0


@dataclass
class Compilation:
    """One compile under way: what all its steps share."""

    request: Request
    store: Store
    backend: Backend
    parent: Parent
    instruments: Sequence[Instrument]
    turns: list[Turn] = field(default_factory=list)

    def loop(self) -> Turn:
        """Search, build, measure; where a limit is missed, correct the limit that the search works to, and again.

        Raises:
            NoArchFits: ACC420 when the turns are used up; the search's own when it finds nothing.
        """
        asked = self.request.target.limits
        limits = asked
        for number in range(1, TURNS + 1):
            turn = self.turn(limits)
            self.turns.append(turn)
            broken = [limit for limit in asked if turn.excess(limit) > 0]
            if not broken:
                return turn
            told = ", ".join(f"{limit.name} {limit} by {turn.excess(limit):.1%}" for limit in broken)
            if number == TURNS or (len(self.turns) > 1 and turn.run.ir.arch == self.turns[-2].run.ir.arch):
                break
            limits = tuple(self.corrected(limit, turn) for limit in asked)
            say(f"measured: missed {told}; the cost model is corrected and the search goes on with " + _listed(limits))
        raise NoArchFits(self.nothing_fits())

    def turn(self, limits: tuple[Limit, ...]) -> Turn:
        """Run the pipeline with the limits that the search is to work to."""
        request = self.request
        target = dataclasses.replace(request.target, limits=limits)
        manager = PassManager(self.store, target, self.backend, request.seed, self.instruments, request.rerun)
        run = manager.run(request.passes, self.parent.ir, enough=self.missed)
        table = run.ir.artifacts.get("table")
        path = self.store.results / table.path if table else None
        workload = target.workload
        predicted = [
            self.backend.cost_model(path, ir, target).predict(ir.model_shape(), workload)
            for ir in (self.parent.ir, run.ir)
        ]
        return Turn(run, limits, (predicted[0], predicted[1]), measured_of(run.facts.get("bench")))

    def missed(self, record: StageRecord) -> bool:
        """Whether a bench shows a limit broken: what comes behind it is for the model that is kept."""
        measured = measured_of(record.facts) if record.stage.one.name == "bench" else None
        return measured is not None and any(excess(limit, measured) > 0 for limit in self.request.target.limits)

    def corrected(self, limit: Limit, turn: Turn) -> Limit:
        """The limit that makes up for what the model predicted too low: asked x predicted / measured.

        Relative limits compare the two models' ratios to the parent, absolute ones the figures themselves. A limit
        that was kept stays as the search had it.
        """
        used = next(one for one in turn.limits if one.name == limit.name)
        if turn.measured is None or turn.excess(limit) <= 0:
            return used
        predicted, measured = getattr(turn.predicted[1], limit.name).value, getattr(turn.measured[1], limit.name)
        if limit.relative:
            predicted /= getattr(turn.predicted[0], limit.name).value
            measured /= getattr(turn.measured[0], limit.name)
        value = limit.value * predicted / measured
        value = max(value, used.value / TIGHTER) if limit.name == "throughput" else min(value, used.value * TIGHTER)
        return dataclasses.replace(limit, value=value)

    def nothing_fits(self) -> Diagnostic:
        """The binding limit, and the architecture that came nearest."""
        asked = self.request.target.limits
        turn = min(self.turns, key=lambda one: max(one.excess(limit) for limit in asked))
        binding = max(asked, key=turn.excess)
        shape = turn.run.ir.model_shape()
        widths = [layer.ffn for layer in shape.layers if layer.ffn]
        nearby = (
            f"hidden {shape.hidden}, {sum(not layer.dropped for layer in shape.layers)} layers, "
            f"FFN {min(widths, default=0)} to {max(widths, default=0)}, "
            f"{turn.run.ir.parameters() / 1e6:.1f} M parameters"
        )
        message = (
            f"after {len(self.turns)} searches no architecture keeps {binding.name} {binding} as measured; "
            f"the nearest ({nearby}) breaks it by {turn.excess(binding):.1%}"
        )
        hint = f"loosen --{binding.name}, or allow smaller dims with another pipeline"
        return Diagnostic("ACC420", self.request.target.name, message, hint)


def compile_model(request: Request, store: Store, instruments: Sequence[Instrument] = ()) -> Report:
    """Compile and write the bundle `request.out`.

    Raises:
        AccError: of any stage; NoArchFits (exit code 1) if nothing keeps the limits.
    """
    from acc.report import html
    from acc.summary import report_of

    check_limits(request.target)
    with bundle.output(request.out) as fresh:
        backend = backend_of(request.target)
        parent = open_parent(request.model, store)
        request = dataclasses.replace(request, passes=runnable(request.passes, request.target))
        if request.table:
            parent = dataclasses.replace(parent, ir=with_table(parent.ir, request.table))
            request = dataclasses.replace(request, passes=tuple(p for p in request.passes if "table" not in p.gives))
        say(f"pipeline: {pipeline.format(request.passes)}")
        check_needs(request.passes, parent.ir)
        refuse(backend, parent.ir, request.target)
        compilation = Compilation(request, store, backend, parent, instruments)
        turn = compilation.loop()
        files = bundle_files(turn.run.ir, backend, request.keep_f16)
        bundle.fill(fresh, turn.run.ir, store.results, files, request.model)
        report = report_of(compilation, turn, fresh / files[backend.artifact])
        bundle.write_json(fresh / "report.json", report.model_dump(mode="json"))
        html.write(report, fresh / "report.html")
        (fresh / "run.md").write_text(_how_to_run(report), "utf-8")
    return report


def backend_of(target: Target) -> Backend:
    """The backend that drives the target's engine. Raises AccError ACC301 or ACC303."""
    return registry.backends().load(target.engine)()


def refuse(backend: Backend, ir: ModelIR, target: Target) -> None:
    """Stop before any work if the engine cannot run the model at all; tell what else it has to say."""
    found = backend.check(ir, target).diagnostics
    if any(one.level == "error" for one in found):
        raise AccError(*found)
    tell(one for one in found if one.level == "warning")


def with_table(ir: ModelIR, table: Path) -> ModelIR:
    """The model with a cost table from elsewhere. Raises AccError ACC335 if there is no such file."""
    try:
        digest = hashlib.sha256(table.read_bytes()).hexdigest()
    except OSError as error:
        hint = "`acc profile --export FILE` writes one"
        raise AccError.of("ACC335", str(table), f"the cost table cannot be read: {error.strerror}", hint) from None
    return ir.with_artifacts(table=Artifact(str(table.absolute()), digest))


def runnable(passes: Sequence[Pass], target: Target) -> tuple[Pass, ...]:
    """The passes without those that measure, where the device is not here; says so."""
    if target.device.here:
        return tuple(passes)
    measuring = [one.name for one in passes if one.measures]
    if measuring:
        say(f"{target.device.name} is not here: {', '.join(measuring)} left out, every cost is estimated")
    return tuple(one for one in passes if not one.measures)


def adapt(passes: Sequence[Pass], calib: Sequence[Path], allow_fallback: bool) -> tuple[Pass, ...]:
    """The passes with `--calib` and `--allow-fallback` set on those that have such an option."""
    given: dict[str, object] = {}
    if calib:
        missing = [path for path in calib if not path.is_file()]
        if missing:
            raise AccError.of("ACC333", str(missing[0]), "calibration text is not there", "give a file with --calib")
        given["data"] = tuple(str(path.absolute()) for path in calib)
    if allow_fallback:
        given["allow_fallback"] = True

    def adapted(one: Pass) -> Pass:
        own = {name: value for name, value in given.items() if name in pipeline.option_types(type(one))}
        return dataclasses.replace(one, **own)

    return tuple(adapted(one) for one in passes)


def until(passes: Sequence[Pass], name: str | None) -> tuple[Pass, ...]:
    """The passes up to and with the last one of a name; all for None."""
    if name is None:
        return tuple(passes)
    names = [one.name for one in passes]
    if name not in names:
        raise AccError.of("ACC334", "--stop-after", f"the pipeline has no pass `{name}`", nearest(name, names))
    return tuple(passes[: len(names) - names[::-1].index(name)])


def subject(model: str, store: Store) -> ModelIR:
    """What `acc opt` and `acc inspect` work on: an IR file, a bundle, or a model."""
    path = Path(model)
    if path.suffix in (".acc", ".json") and path.is_file():
        return read_ir(path)
    if bundle.is_bundle(path):
        return bundle.read(path).ir
    return open_parent(model, store).ir


def excess(limit: Limit, measured: tuple[Measured, Measured]) -> float:
    """How far the child breaks a limit as asked, as a fraction of it, given the figures of parent and child."""
    parent, child = (getattr(side, limit.name) for side in measured)
    return limit.resolve(parent).violation(child)


def measured_of(facts: Mapping[str, Any] | None) -> tuple[Measured, Measured] | None:
    """The parent's and the child's figures in the facts of `bench`; None if it did not run."""
    from pydantic import TypeAdapter

    from acc.backend_api import Measured

    if facts is None:
        return None
    read = TypeAdapter(Measured).validate_python
    return read(facts["parent"]), read(facts["child"])


def bundle_files(ir: ModelIR, backend: Backend, keep_f16: bool) -> dict[str, str]:
    """The name in the bundle of each artifact that goes into it."""
    kind = backend.artifact
    names = {kind: f"model.{kind}", f"{kind}_f16": f"model-f16.{kind}", "hf": "hf"}
    return {one: name for one, name in names.items() if one in ir.artifacts and (keep_f16 or one != f"{kind}_f16")}


def _listed(limits: Sequence[Limit]) -> str:
    return ", ".join(f"{limit.name} {limit}" for limit in limits)


def _how_to_run(report: Report) -> str:
    lines = "\n".join(f"    {line}" for line in report.run)
    return f"# How to run\n\nCompiled from {report.model} for {report.target.name}.\n\n{lines}\n"
