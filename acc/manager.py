"""The PassManager: runs passes in order, each verified before and after, each looked up in the store first."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acc import pipeline
from acc.diag import AccError, Diagnostic
from acc.fingerprint import code_digest, stage_key
from acc.ir import ModelIR
from acc.passes_api import Context, Pass, PassResult
from acc.store import Entry, Store, disk_error

if TYPE_CHECKING:
    from acc.backend_api import Backend
    from acc.target import Target


@dataclass(frozen=True)
class Stage:
    """One pass in its place.

    Attributes:
        number: from 1.
        total: passes in the pipeline.
        spec: the text of the pass.
    """

    number: int
    total: int
    spec: str
    one: Pass

    def __str__(self) -> str:
        return f"pass {self.number} of {self.total}, `{self.spec}`"


@dataclass(frozen=True)
class StageRecord:
    """What a stage took: `stored` if it came from the store, with the seconds and bytes of the run that made it."""

    stage: Stage
    key: str
    stored: bool
    seconds: float
    peak_rss_bytes: int
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """A finished pipeline: the model after the last pass, and what each stage told and took."""

    ir: ModelIR
    records: tuple[StageRecord, ...]

    @property
    def facts(self) -> dict[str, Mapping[str, Any]]:
        """The facts of each pass by name; of the last one where a pass ran twice."""
        return {record.stage.one.name: record.facts for record in self.records}


class Instrument:
    """Watches a run. All methods may be left as they are."""

    def before(self, stage: Stage, ir: ModelIR) -> None:
        """A stage is about to be looked up or run."""

    def progress(self, stage: Stage, step: int, total: int, what: str) -> None:
        """A running pass reports."""

    def after(self, record: StageRecord, before: ModelIR, after: ModelIR) -> None:
        """A stage is done."""

    def failed(self, stage: Stage) -> None:
        """A stage ended with an error or was interrupted."""


@dataclass(frozen=True)
class PassManager:
    """Runs pipelines in one surroundings.

    Attributes:
        command: the start of a command that runs a pass alone in the same surroundings, e.g.
            `("--target", "cpu-llamacpp", "--tpot", "0.7x")`; said when a pass fails.
    """

    store: Store
    target: Target | None = None
    backend: Backend | None = None
    seed: int = 0
    instruments: Sequence[Instrument] = ()
    command: Sequence[str] = ()
    engine: str = field(default="", init=False)

    def __post_init__(self) -> None:
        text = ""
        if self.backend and self.target:
            with contextlib.suppress(AccError):  # passes that need an engine say so themselves
                found = self.backend.engine(self.target)
                text = f"{found.engine} {found.version} {found.build}" if found else ""
        object.__setattr__(self, "engine", text)

    def run(self, passes: Sequence[Pass], ir: ModelIR, enough: Callable[[StageRecord], bool] | None = None) -> Run:
        """Run a pipeline. Stages that are in the store are not run again.

        Args:
            enough: asked after each stage; the rest of the pipeline is left out once it says yes.

        Raises:
            AccError: of the pass that failed, with its place and the command that runs it alone; ACC320 if a pass
                needs what nothing gives; ACC321 if a pass breaks the contract or raises something else.
            Interrupted: on Ctrl-C, with the stage that it came in.
        """
        check_needs(passes, ir)
        known: dict[str, Mapping[str, Any]] = {}
        records: list[StageRecord] = []
        for number, one in enumerate(passes, 1):
            stage = Stage(number, len(passes), pipeline.spec(one), one)
            try:
                record, after = self._stage(stage, ir, known)
            except KeyboardInterrupt:
                self._each("failed", stage)
                raise Interrupted(stage) from None
            except Exception:
                self._each("failed", stage)
                raise
            self._each("after", record, ir, after)
            ir = after
            records.append(record)
            known[one.name] = record.facts
            if enough and enough(record):
                break
        return Run(ir, tuple(records))

    def _stage(self, stage: Stage, ir: ModelIR, facts: Mapping[str, Mapping[str, Any]]) -> tuple[StageRecord, ModelIR]:
        self._each("before", stage, ir)
        check_ir(ir, stage, "before")
        key = stage_key(stage.one, ir, target=self.target, engine=self.engine, seed=self.seed)
        if not stage.one.cached:
            key = f"{key}-{time.time_ns():x}"
        entry = self.store.find(key)
        if entry is not None:
            return self._record(stage, entry, stored=True)
        with self.store.writer(key, resume=stage.one.resumes) as scratch:
            entry = self.store.find(key)  # another process may have made it while this one waited
            if entry is not None:
                return self._record(stage, entry, stored=True)
            entry = self._compute(stage, key, ir, scratch, facts)
            self.store.commit(entry)
        return self._record(stage, entry, stored=False)

    def _compute(
        self, stage: Stage, key: str, ir: ModelIR, scratch: Path, facts: Mapping[str, Mapping[str, Any]]
    ) -> Entry:
        from acc.instruments import Meter, stdout_aside

        one, blind = stage.one, not stage.one.reads

        def progress(step: int, total: int, what: str = "") -> None:
            self._each("progress", stage, step, total, what)

        context = Context(
            store=self.store.results,
            scratch=scratch,
            key=key,
            target=None if blind else self.target,
            backend=None if blind else self.backend,
            seed=self.seed,
            progress=progress,
            facts=facts,
            code=code_digest(type(one).__module__),
            use=self.store.use,
        )
        digest = ir.digest()
        with Meter() as meter, stdout_aside():
            try:
                result = one.run(ir, context)
            except Exception as error:
                raise self._failure(stage, key, ir, error) from error
        self._check_contract(stage, key, ir, digest, result)
        return Entry(key, result.ir.to_json(), dict(result.facts), meter.seconds, meter.peak_rss_bytes)

    def _record(self, stage: Stage, entry: Entry, *, stored: bool) -> tuple[StageRecord, ModelIR]:
        record = StageRecord(stage, entry.key, stored, entry.seconds, entry.peak_rss_bytes, entry.facts)
        return record, ModelIR.from_json(entry.ir)

    def _check_contract(self, stage: Stage, key: str, ir: ModelIR, digest: str, result: PassResult) -> None:
        check_ir(result.ir, stage, "after")
        faults = []
        if ir.digest() != digest:
            faults.append("it changed the IR that it was given")
        try:
            json.dumps(dict(result.facts))
        except (TypeError, ValueError) as error:
            faults.append(f"its facts are not JSON: {error}")
        missing = [kind for kind in stage.one.gives if kind not in result.ir.artifacts]
        if missing:
            faults.append(f"it did not leave {_listed(missing)}")
        here = self.store.scratch / key
        for kind, artifact in result.ir.artifacts.items():
            if artifact.path.startswith(f"{key}/") and not (here / artifact.path.removeprefix(f"{key}/")).exists():
                faults.append(f"it names `{kind}` but wrote no {artifact.path.removeprefix(f'{key}/')}")
        if faults:
            raise AccError(*(Diagnostic("ACC321", str(stage), fault, "this is a bug of the pass") for fault in faults))

    def _failure(self, stage: Stage, key: str, ir: ModelIR, error: Exception) -> AccError:
        told = error if isinstance(error, AccError) else disk_error(error, self.store.root, f"run {stage}")
        if told is None:
            message = f"{type(error).__name__}: {error}"
            told = AccError.of("ACC321", str(stage), message, "this is a bug of the pass; --debug shows where")
        if any(one.code == "ACC502" for one in told.diagnostics):
            return told  # there is no room to keep a state
        state = self.store.save_state(key, ir.to_json())
        words = ["acc", "opt", str(state), *self.command, "--store", str(self.store.root), "-p", stage.spec]
        note = Diagnostic("ACC322", str(stage), "failed", f"run it alone with: {shlex.join(words)}", "note")
        return type(told)(*told.diagnostics, note)

    def _each(self, method: str, *arguments: object) -> None:
        for instrument in self.instruments:
            getattr(instrument, method)(*arguments)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, and the stage that it came in."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        super().__init__(str(stage))


def check_needs(passes: Sequence[Pass], ir: ModelIR) -> None:
    """Raise AccError ACC320 if a pass needs an artifact that neither the model has nor a pass before gives."""
    have = set(ir.artifacts)
    faults = []
    for number, one in enumerate(passes, 1):
        missing = [kind for kind in one.needs if kind not in have]
        if missing:
            message = f"needs {_listed(missing)}, which no pass before it gives"
            place = str(Stage(number, len(passes), pipeline.spec(one), one))
            faults.append(Diagnostic("ACC320", place, message, _givers(missing)))
        have |= set(one.gives)
    if faults:
        raise AccError(*faults)


def check_ir(ir: ModelIR, stage: Stage, when: str) -> None:
    """Raise AccError with what the verifier finds, each finding with the pass that it was found at."""
    from acc.verify import verify

    faults = [one for one in verify(ir) if one.level == "error"]
    if faults:
        raise AccError(*(dataclasses.replace(one, where=f"{when} {stage}: {one.where}") for one in faults))


def _givers(kinds: Sequence[str]) -> str:
    """Which passes could go before, among those that can be loaded."""
    from acc import registry

    found = []
    for name in registry.passes().names():
        try:
            cls = registry.passes().load(name)
        except AccError:
            continue
        if set(cls.gives) & set(kinds):
            found.append(name)
    return f"put {_listed(found)} before it" if found else ""


def _listed(kinds: Sequence[str]) -> str:
    return " and ".join(f"`{kind}`" for kind in kinds)
