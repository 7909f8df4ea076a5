"""Timing many models in interleaved rounds, against drift and noise, so that a killed run loses at most one visit.

In each round every model is visited in a new order. The reference (the parent) is timed before and after each timing
of a visit: what its decodes take now, over what they take on the whole, is how fast the machine is now, and decodes
are divided by it. Visits during which other programs were at work are left out where enough quiet ones remain, and
rounds are added until they do.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from acc.backends.llamacpp.noise import QUIET, Mark
from acc.backends.llamacpp.probes import write_probe
from acc.diag import AccError
from acc.target import Workload

if TYPE_CHECKING:
    from acc.backends.llamacpp.session import LlamaSession
    from acc.ir import ModelIR
    from acc.target import Target

MEMORY_SHARE = 0.25
"""Probes are opened together as far as this share of the machine's memory holds them."""

REFERENCE_STEPS = 8
REPEAT_SECONDS = 0.25
"""A prompt that takes less is timed up to three times a visit."""

FORMAT = 2
"""Raise it when visits are measured or written otherwise."""

Note = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Visit:
    """One timing of one model.

    Attributes:
        first: seconds to the first token, by prompt.
        step: median seconds of a decode after it, by prompt.
        reference: the reference's (first, step) seconds around each of these timings, by prompt.
        others: share of the cores that other programs took.
    """

    model: str
    round: int
    first: Mapping[str, float]
    step: Mapping[str, float]
    reference: Mapping[str, tuple[float, float]]
    others: float


@dataclass(frozen=True)
class Timing:
    """What the visits of one model come to: seconds by prompt, corrected for drift, and their relative spread."""

    first: Mapping[int, float]
    step: Mapping[int, float]
    first_spread: Mapping[int, float]
    step_spread: Mapping[int, float]
    visits: int
    quiet: int


@dataclass(frozen=True)
class Schedule:
    """What a visit measures: prompts, decodes after each, rounds wanted and allowed."""

    prompts: tuple[int, ...]
    steps: int = 12
    rounds: int = 3
    most_rounds: int = 6

    @property
    def context(self) -> int:
        """Tokens that a session must hold."""
        return max(self.prompts) + self.steps


@dataclass
class Record:
    """Visits on disk, one JSON line each; lines of another plan, or torn by a kill, are not taken over."""

    path: Path
    plan: str
    visits: list[Visit] = field(default_factory=list)
    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lines = self.path.read_text("utf-8").splitlines() if self.path.exists() else []
        if not lines or _parsed(lines[0]) != {"plan": self.plan}:
            self.path.write_text(json.dumps({"plan": self.plan}) + "\n", "utf-8")
            return
        for line in lines[1:]:
            row = _parsed(line)
            if "memory" in row:
                self.memory[row["model"]] = row["memory"]
            elif "details" in row:
                self.details = row["details"]
            elif "model" in row:
                around = {prompt: (pair[0], pair[1]) for prompt, pair in row["reference"].items()}
                self.visits.append(Visit(**{**row, "reference": around}))
        if lines and not self.path.read_text("utf-8").endswith("\n"):  # torn: begin a new line
            self._append("")

    def add(self, visit: Visit) -> None:
        """Keep a visit."""
        self.visits.append(visit)
        self._append(json.dumps(asdict(visit)))

    def add_memory(self, model: str, found: Mapping[str, int]) -> None:
        """Keep what the engine reported for a model."""
        self.memory[model] = dict(found)
        self._append(json.dumps({"model": model, "memory": self.memory[model]}))

    def add_details(self, details: Mapping[str, Any]) -> None:
        """Keep how the engine was loaded."""
        if not self.details:
            self.details = dict(details)
            self._append(json.dumps({"details": self.details}))

    def _append(self, line: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def of(self, model: str) -> list[Visit]:
        """The visits of one model."""
        return [visit for visit in self.visits if visit.model == model]


def run(
    models: Mapping[str, ModelIR], reference: str, schedule: Schedule, target: Target, record: Record, note: Note
) -> None:
    """Time all models, those and rounds that are in the record already left out.

    Args:
        models: by name; `reference` is one of them.
    """
    total = len(models) * schedule.rounds
    for group in _groups([name for name in models if name != reference], models, target):
        names = [reference, *group]
        with ExitStack() as stack:
            sessions: dict[str, LlamaSession] = {}
            for number in range(schedule.most_rounds):
                left = [name for name in names if _wanted(record.of(name), number, schedule)]
                random.Random(number).shuffle(left)
                for name in left:
                    for one in {reference, name} - sessions.keys():
                        sessions[one] = _opened(
                            models[one], target, schedule, record.path.parent / f"{one}.gguf", stack
                        )
                        record.add_memory(one, sessions[one].memory())
                        record.add_details({**sessions[one].details, "engine": asdict(sessions[one].info)})
                    record.add(_visit(name, number, sessions, reference, schedule))
                    done = sum(min(len(record.of(one)), schedule.rounds) for one in models)
                    note(done, total, f"round {number + 1}")


def timing(visits: Sequence[Visit], typical: float, prompts: Iterable[int]) -> Timing:
    """What the visits of one model come to.

    A prompt keeps the cores busy, so that whatever else happens only adds to it: the fastest round tells what it is.
    A decode waits for caches and memory that others share, now more and now less: the median of the rounds does, each
    divided by how slow the reference's decodes around it were. Halves of the rounds agree best so.

    Args:
        typical: the reference's seconds per decode over all visits of the run, from `typical_step`.
    """
    first, step, first_spread, step_spread = {}, {}, {}, {}
    for prompt in prompts:
        key = str(prompt)
        firsts = [visit.first[key] for visit in visits]
        steps = [visit.step[key] * typical / visit.reference[key][1] for visit in quiet(visits)]
        first[prompt], first_spread[prompt] = min(firsts), _spread(firsts)
        step[prompt], step_spread[prompt] = median(steps), _spread(steps)
    return Timing(first, step, first_spread, step_spread, len(visits), sum(v.others <= QUIET for v in visits))


def typical_step(visits: Sequence[Visit]) -> float:
    """The reference's usual seconds per decode."""
    return median(step for visit in quiet(visits) for _, step in visit.reference.values())


def quiet(visits: Sequence[Visit]) -> list[Visit]:
    """The visits that nobody disturbed, or, where fewer than two are, the least disturbed half."""
    undisturbed = [visit for visit in visits if visit.others <= QUIET]
    if len(undisturbed) >= 2:
        return undisturbed
    return sorted(visits, key=lambda visit: visit.others)[: max(2, len(visits) // 2)]


def _wanted(visits: Sequence[Visit], number: int, schedule: Schedule) -> bool:
    """Whether a model needs a visit in that round: it has not had it, and has too few quiet ones."""
    if any(visit.round == number for visit in visits):
        return False
    return number < schedule.rounds or sum(visit.others <= QUIET for visit in visits) < max(2, schedule.rounds // 2)


def _visit(name: str, number: int, sessions: Mapping[str, LlamaSession], reference: str, schedule: Schedule) -> Visit:
    mark = Mark.now()
    short = min(schedule.prompts)
    first, step, around = {}, {}, {}
    before = _time(sessions[reference], short, min(REFERENCE_STEPS, schedule.steps), 0.0)
    for prompt in schedule.prompts:
        key = str(prompt)
        first[key], step[key] = _time(sessions[name], prompt, schedule.steps, REPEAT_SECONDS)
        after = _time(sessions[reference], short, min(REFERENCE_STEPS, schedule.steps), 0.0)
        around[key] = ((before[0] + after[0]) / 2, (before[1] + after[1]) / 2)
        before = after
    return Visit(name, number, first, step, around, mark.others())


def _time(session: LlamaSession, prompt: int, steps: int, least: float) -> tuple[float, float]:
    """Seconds to the first token and of one decode after it: medians of up to three rounds."""
    workload = Workload("probe", prompt, steps)
    rounds = [session.round(workload)]
    while len(rounds) < 3 and sum(first for first, _ in rounds) < least:
        rounds.append(session.round(workload))
    return median(first for first, _ in rounds), median(step for _, found in rounds for step in found)


def _opened(ir: ModelIR, target: Target, schedule: Schedule, file: Path, stack: ExitStack) -> LlamaSession:
    """A session of a probe file, which is deleted when the session is closed."""
    from acc.backends.llamacpp.session import LlamaSession, open_session

    stack.callback(file.unlink, missing_ok=True)
    write_probe(ir, target.quant, file)
    session = stack.enter_context(open_session(file, target, context=schedule.context))
    if not isinstance(session, LlamaSession):
        hint = "`pip install xllamacpp`, or leave the engine option `path` away"
        raise AccError.of("LC070", "profile", "an engine without libllama cannot be profiled", hint)
    return session


def _groups(names: Sequence[str], models: Mapping[str, ModelIR], target: Target) -> list[list[str]]:
    """Models that fit into memory together (each about as large as its F16 parameters at most)."""
    import psutil

    room = MEMORY_SHARE * psutil.virtual_memory().total
    groups: list[list[str]] = [[]]
    held = 0.0
    for name in names:
        size = 2.0 * models[name].parameters() + 2e8
        if groups[-1] and held + size > room:
            groups.append([])
            held = 0.0
        groups[-1].append(name)
        held += size
    return groups


def _spread(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / middle


def _parsed(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}
