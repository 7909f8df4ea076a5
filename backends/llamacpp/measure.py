"""Timing many models in interleaved rounds, against drift and noise, so that a killed run loses at most one visit.

In each round every model is visited in a new order. The median visit counts, as the median round does in `bench`: a
model that lies partly in the processor's caches takes 20 % more or less from visit to visit, so that its fastest one
is what nobody will see again. A model is visited until the median of every prompt is known well enough.
"""

from __future__ import annotations

import json
import math
import random
import time
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

MEMORY_SHARE = 0.5
"""Probes are opened together as far as this share of the machine's memory holds them."""

REPEAT_SECONDS = 0.25
"""A prompt that takes less is timed up to three times a visit."""
KNOWN = 0.03
"""Relative standard error of a median below which a prompt needs no further visit."""

FORMAT = 4
"""Raise it when visits are measured or written otherwise."""

Note = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Visit:
    """One timing of one model.

    Attributes:
        first: seconds to the first token, by the prompts that were timed.
        step: median seconds of a decode after it, likewise.
        others: share of the cores that other programs of this machine took.
    """

    model: str
    round: int
    first: Mapping[str, float]
    step: Mapping[str, float]
    others: float


@dataclass(frozen=True)
class Timing:
    """What the visits of one model come to: seconds by prompt, and the relative spread of the visits."""

    first: Mapping[int, float]
    step: Mapping[int, float]
    first_spread: Mapping[int, float]
    step_spread: Mapping[int, float]
    visits: int
    quiet: int


@dataclass(frozen=True)
class Schedule:
    """What a visit measures, and how often.

    Attributes:
        steps: decodes that count after each prompt.
        warming: decodes before them that do not. The prompt pushed weights out of the caches, and it takes some twenty
            decodes until as many as fit are back; they are a small part of a workload's output.
        rounds, most_rounds: visits of every model, and of one that is not settled.
        seconds: after which no visit beyond `rounds` begins.
    """

    prompts: tuple[int, ...]
    steps: int = 24
    warming: int = 24
    rounds: int = 3
    most_rounds: int = 12
    seconds: float = math.inf

    @property
    def context(self) -> int:
        """Tokens that a session must hold: a prompt, the token that it gives, and one per decode."""
        return max(self.prompts) + 1 + self.warming + self.steps

    def depth(self, prompt: int) -> int:
        """Tokens held in the middle of the decodes that count."""
        return prompt + self.warming + self.steps // 2


@dataclass(frozen=True)
class Job:
    """A model to be timed, and how."""

    ir: ModelIR
    schedule: Schedule


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
                self.visits.append(Visit(**row))
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


def run(jobs: Mapping[str, Job], target: Target, record: Record, note: Note) -> None:
    """Time all models by name, in turns; visits that are in the record already are not made again."""
    total, started = sum(job.schedule.rounds for job in jobs.values()), time.monotonic()
    for names in _groups(jobs):
        with ExitStack() as stack:
            sessions: dict[str, LlamaSession] = {}
            for number in range(max(jobs[name].schedule.most_rounds for name in names)):
                left = [name for name in names if open_prompts(record.of(name), number, jobs[name].schedule)]
                random.Random(number).shuffle(left)
                for name in left:
                    job = jobs[name]
                    if number >= job.schedule.rounds and time.monotonic() - started > job.schedule.seconds:
                        continue
                    if name not in sessions:
                        file = record.path.parent / f"{name}.gguf"
                        sessions[name] = _opened(job, target, file, stack)
                        record.add_memory(name, sessions[name].memory())
                        record.add_details({**sessions[name].details, "engine": asdict(sessions[name].info)})
                    prompts = open_prompts(record.of(name), number, job.schedule)
                    record.add(_visit(name, number, sessions[name], prompts, job.schedule))
                    done = sum(min(len(record.of(one)), jobs[one].schedule.rounds) for one in jobs)
                    note(done, total, f"round {number + 1}")


def timing(visits: Sequence[Visit], prompts: Iterable[int]) -> Timing:
    """What the visits of one model come to: medians, prompt by prompt."""
    first, step, first_spread, step_spread = {}, {}, {}, {}
    for prompt in prompts:
        firsts, steps = _timed(visits, prompt)
        first[prompt], first_spread[prompt] = median(firsts), _spread(firsts)
        step[prompt], step_spread[prompt] = median(steps), _spread(steps)
    return Timing(first, step, first_spread, step_spread, len(visits), sum(v.others <= QUIET for v in visits))


def open_prompts(visits: Sequence[Visit], number: int, schedule: Schedule) -> tuple[int, ...]:
    """The prompts that a model is to be timed with in a round: beyond the wanted rounds, those not settled yet."""
    if number >= schedule.most_rounds or any(visit.round == number for visit in visits):
        return ()
    if number < schedule.rounds:
        return schedule.prompts
    return tuple(prompt for prompt in schedule.prompts if not settled(visits, prompt))


def settled(visits: Sequence[Visit], prompt: int) -> bool:
    """Whether the medians of a prompt and of the decodes after it are known well enough."""
    return all(_uncertainty(seconds) <= KNOWN for seconds in _timed(visits, prompt))


def _visit(name: str, number: int, session: LlamaSession, prompts: Sequence[int], schedule: Schedule) -> Visit:
    mark = Mark.now()
    first, step = {}, {}
    for prompt in prompts:
        first[str(prompt)], step[str(prompt)] = _time(session, prompt, schedule)
    return Visit(name, number, first, step, mark.others())


def _time(session: LlamaSession, prompt: int, schedule: Schedule) -> tuple[float, float]:
    """Seconds to the first token, the median of up to three rounds, and of one decode after it, likewise."""
    first, decodes = session.round(Workload("probe", prompt, 1 + schedule.warming + schedule.steps))
    rounds = [first]
    while len(rounds) < 3 and sum(rounds) < REPEAT_SECONDS:
        rounds.append(session.round(Workload("probe", prompt, 1))[0])
    return median(rounds), median(decodes[schedule.warming :])


def _opened(job: Job, target: Target, file: Path, stack: ExitStack) -> LlamaSession:
    """A session of a probe file, which is deleted when the session is closed."""
    from acc.backends.llamacpp.session import LlamaSession, open_session

    stack.callback(file.unlink, missing_ok=True)
    write_probe(job.ir, target.quant, file)
    session = stack.enter_context(open_session(file, target, context=job.schedule.context))
    if not isinstance(session, LlamaSession):
        hint = "`pip install xllamacpp`, or leave the engine option `path` away"
        raise AccError.of("LC070", "profile", "an engine without libllama cannot be profiled", hint)
    return session


def _groups(jobs: Mapping[str, Job]) -> list[list[str]]:
    """Models that fit into memory together (each about as large as its F16 parameters at most)."""
    import psutil

    room = MEMORY_SHARE * psutil.virtual_memory().total
    groups: list[list[str]] = [[]]
    held = 0.0
    for name, job in jobs.items():
        size = 2.0 * job.ir.parameters() + 2e8
        if groups[-1] and held + size > room:
            groups.append([])
            held = 0.0
        groups[-1].append(name)
        held += size
    return groups


def _timed(visits: Sequence[Visit], prompt: int) -> tuple[list[float], list[float]]:
    """Seconds to the first token, and of a decode after it, in the visits that timed a prompt."""
    key = str(prompt)
    timed = [visit for visit in visits if key in visit.first]
    return [visit.first[key] for visit in timed], [visit.step[key] for visit in timed]


def _spread(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / middle


def _uncertainty(values: Sequence[float]) -> float:
    """Relative standard error of the median of a normal sample: 1.25 deviations, each 1.48 spreads, over its root."""
    return 1.86 * _spread(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def _parsed(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}
