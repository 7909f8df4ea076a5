"""What a report says, as data: `report.json` is exactly this, and the terminal and HTML forms are drawn from it.

Every cost is a `Figure`: a value with its unit, its error band and its provenance (measured, interpolated, estimated).
Predicted and measured costs live in different fields and are never mixed in one column.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from acc.backend_api import EngineInfo, LoweringPlan, Measured, TensorPlan
from acc.cost import Costs, Figure
from acc.diag import Diagnostic
from acc.ir import ModelIR, ModelShape
from acc.target import LIMIT_UNITS, Limit, LimitName, Target

Verdict = Literal["kept", "broken", "unknown"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TypeCount(_Record):
    """How much of an artifact is stored as one tensor type."""

    tensors: int
    weights: int
    bytes: int


class Side(_Record):
    """One of the two models that a report compares, as it is stored and as it is served.

    Attributes:
        name: the path or id of the parent; the output folder of the child.
        host: the engine's architecture that holds the shapes.
        file_bytes: size of the written file; equal to `planned_bytes` where only a plan exists.
        types: tensor types of the artifact.
        fallbacks: tensors stored in another type than the one asked for.
        predicted: from the cost model; None where no cost model was made.
        measured: from the engine; None where the device or the engine is not here.
    """

    name: str
    shape: ModelShape
    parameters: int
    quant: str
    host: str
    planned_bytes: int
    file_bytes: int
    bits_per_weight: float
    types: dict[str, TypeCount]
    fallbacks: tuple[TensorPlan, ...] = ()
    predicted: Costs | None = None
    measured: Measured | None = None

    @classmethod
    def of(
        cls,
        name: str,
        ir: ModelIR,
        quant: str,
        plan: LoweringPlan,
        *,
        file: Path | None = None,
        predicted: Costs | None = None,
        measured: Measured | None = None,
    ) -> Side:
        """The side of one Arch: `plan` says how it is stored, `file` is the artifact if it was written."""
        return cls(
            name=name,
            shape=ir.model_shape(),
            parameters=ir.parameters(),
            quant=quant,
            host=plan.host,
            planned_bytes=plan.file_bytes,
            file_bytes=file.stat().st_size if file else plan.file_bytes,
            bits_per_weight=plan.bits_per_weight,
            types=_type_counts(plan.tensors),
            fallbacks=plan.fallbacks,
            predicted=predicted,
            measured=measured,
        )

    def predicted_figure(self, name: LimitName) -> Figure | None:
        """What the cost model said of one cost."""
        return getattr(self.predicted, name) if self.predicted else None

    def measured_figure(self, name: LimitName) -> Figure | None:
        """What the engine showed of one cost; its error is the `spread` of the rounds."""
        if self.measured is None:
            return None
        value = float(getattr(self.measured, name))
        return Figure(value, LIMIT_UNITS[name], "measured", spread(self.measured.rounds.get(name, ())))

    def figures(self, name: LimitName) -> dict[str, Figure]:
        """What is known of one cost: `predicted`, then `measured`."""
        known = {"predicted": self.predicted_figure(name), "measured": self.measured_figure(name)}
        return {kind: number for kind, number in known.items() if number}


class LimitLine(_Record):
    """One limit: as asked, as an absolute number, and how the child stands to it, predicted and measured apart."""

    asked: Limit
    limit: Limit | None
    parent: Figure | None
    predicted: Figure | None
    measured: Figure | None

    @classmethod
    def of(cls, asked: Limit, parent: Side, child: Side) -> LimitLine:
        """Relative limits are resolved by the parent's measurement, or by its prediction where nothing was measured."""
        base = parent.measured_figure(asked.name) or parent.predicted_figure(asked.name)
        limit = asked.resolve(base.value) if base else (None if asked.relative else asked)
        predicted, measured = child.predicted_figure(asked.name), child.measured_figure(asked.name)
        return cls(asked=asked, limit=limit, parent=base, predicted=predicted, measured=measured)

    @property
    def verdict(self) -> Verdict:
        """Judged by the measurement; by the prediction where there is none (`judged_by` says which)."""
        figure = self.measured or self.predicted
        if figure is None or self.limit is None:
            return "unknown"
        return "kept" if self.limit.violation(figure.value) <= 0 else "broken"

    @property
    def judged_by(self) -> str:
        """The provenance of the figure that the verdict rests on."""
        figure = self.measured or self.predicted
        return figure.source if figure else "nothing"


class Attempt(_Record):
    """One turn of the closed loop: the Arch that came out, what was predicted of it, what the engine showed."""

    shape: ModelShape
    predicted: Costs | None
    measured: Measured | None
    note: str = ""


class Quality(_Record):
    """How well one form of one model predicts one text.

    Attributes:
        what: e.g. `parent, float32` or `child, q4_k_m in the engine`.
        perplexity: exp of the mean loss per token.
        kl_nats: mean KL divergence from the parent, in nats per token; None for the parent itself.
        text: what it was judged on; `tokens` of it.
    """

    what: str
    model: Literal["parent", "child"]
    perplexity: float | None
    kl_nats: float | None
    tokens: int
    text: str


class Parity(_Record):
    """Whether the engine computes what PyTorch computes, for one artifact.

    Attributes:
        artifact: e.g. `F16` or `Q4_K_M`; reference: what PyTorch ran, e.g. `float32` or `dequantized weights`.
        kl_nats, kl_limit_nats: mean KL divergence, and the most that is accepted.
        greedy_match: how many of the first `greedy_tokens` greedy tokens agree before the first difference;
            None if they were not compared.
    """

    artifact: str
    reference: str
    kl_nats: float
    kl_limit_nats: float
    tokens: int
    greedy_match: int | None = None
    greedy_tokens: int | None = None

    @property
    def passed(self) -> bool:
        """Whether the divergence is within its limit, and the greedy tokens agree where they were compared."""
        return self.kl_nats <= self.kl_limit_nats and self.greedy_match == self.greedy_tokens


class Stage(_Record):
    """One pass as it ran. `cached`: its result came from the store; seconds are then those of the first run."""

    name: str
    spec: str
    seconds: float
    peak_memory_bytes: int | None = None
    cached: bool = False


class Machine(_Record):
    """The machine that the compile ran on."""

    processor: str
    cores: int
    memory_bytes: int
    system: str
    python: str
    accelerators: tuple[str, ...] = ()


class Report(_Record):
    """Everything that one compile has to say.

    Attributes:
        format: raised when a field changes its meaning.
        command: the command line as given.
        pipeline: the text that `acc opt -p` takes.
        engine: the installation that was measured and verified with; None if there is none.
        limits: one line per limit of the target.
        quality, parity, stages: in the order in which they came about.
        attempts: turns of the closed loop before the one reported, if any.
        notes: every warning, fallback, refusal and diagnostic, of every stage.
        versions: of acc and the libraries that the result depends on.
        date: ISO 8601, UTC.
        run: commands that serve the result.
        facts: what each pass told, by its name; for tools.
    """

    format: Literal[1] = 1
    command: str
    model: str
    family: str
    target: Target
    pipeline: str
    engine: EngineInfo | None
    parent: Side
    child: Side
    limits: tuple[LimitLine, ...]
    quality: tuple[Quality, ...] = ()
    parity: tuple[Parity, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    notes: tuple[Diagnostic, ...] = ()
    stages: tuple[Stage, ...] = ()
    machine: Machine
    versions: dict[str, str]
    date: str
    run: tuple[str, ...] = ()
    facts: dict[str, dict[str, Any]] = {}

    @property
    def verdict(self) -> Verdict:
        """Kept if every limit is kept and known; broken if one is broken."""
        verdicts = {line.verdict for line in self.limits}
        if "broken" in verdicts:
            return "broken"
        return "unknown" if "unknown" in verdicts else "kept"

    @property
    def seconds(self) -> float:
        """Work that this result took, cached stages with the time of their first run."""
        return sum(stage.seconds for stage in self.stages)


def limit_lines(limits: Iterable[Limit], parent: Side, child: Side) -> tuple[LimitLine, ...]:
    """One line per limit, in the order of the target."""
    return tuple(LimitLine.of(limit, parent, child) for limit in limits)


def spread(rounds: Sequence[float]) -> float:
    """Half the interquartile range of some rounds as a fraction of their median; 0 for fewer than two."""
    if len(rounds) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(rounds, n=4, method="inclusive")
    return (high - low) / 2 / middle if middle else 0.0


def _type_counts(tensors: Iterable[TensorPlan]) -> dict[str, TypeCount]:
    count: Counter[str] = Counter()
    weights: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for tensor in tensors:
        product = 1
        for extent in tensor.shape:
            product *= extent
        count[tensor.type] += 1
        weights[tensor.type] += product
        size[tensor.type] += tensor.bytes
    return {
        kind: TypeCount(tensors=count[kind], weights=weights[kind], bytes=total) for kind, total in size.most_common()
    }


def read(path: Path) -> Report:
    """A report from its `report.json`."""
    return Report.model_validate_json(path.read_text("utf-8"))


def dump(report: Report) -> Mapping[str, Any]:
    """A report as a JSON value."""
    return report.model_dump(mode="json")
