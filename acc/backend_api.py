"""The contract of a backend: one serving engine; what it can run, what it costs, how a model is handed over and run.

Engines run in child processes. A missing, crashing or hanging engine raises AccError; it never takes acc down.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from acc.diag import AccError, Diagnostic
from acc.ir import Artifact, ModelIR, ModelShape, Role
from acc.target import Target, Workload

if TYPE_CHECKING:
    import numpy as np

    from acc.cost import Costs, CostTable
    from acc.passes_api import Context
    from acc.validation import ValidationResult


@dataclass(frozen=True)
class EngineInfo:
    """One usable installation of an engine: how it was found (`wheel`, `folder`, `built`), version, build flags."""

    engine: str
    origin: str
    version: str
    build: str
    path: str
    can: tuple[str, ...]


@dataclass(frozen=True)
class Grid:
    """Sizes of one role that the engine runs on its fast path: multiples of `step`, at least `minimum`.

    `uniform`: all layers must have one size.
    """

    role: Role
    step: int = 1
    minimum: int = 1
    uniform: bool = False
    why: str = ""


@dataclass(frozen=True)
class TensorPlan:
    """How one tensor of the artifact is stored; `wanted` differs from `type` where the format forces a fallback."""

    name: str
    shape: tuple[int, ...]
    type: str
    wanted: str
    bytes: int


@dataclass(frozen=True)
class LoweringPlan:
    """What a lowering would write, known before any compute.

    Attributes:
        host: the engine's architecture that will hold the shapes.
        notes: what had to be padded, made uniform, folded or refused, and what that costs.
        file_bytes: exact size of the file.
    """

    host: str
    tensors: tuple[TensorPlan, ...]
    file_bytes: int
    notes: tuple[Diagnostic, ...] = ()

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per stored weight, over all tensors."""
        weights = sum(_product(tensor.shape) for tensor in self.tensors)
        return 8 * sum(tensor.bytes for tensor in self.tensors) / weights

    @property
    def fallbacks(self) -> tuple[TensorPlan, ...]:
        """Tensors that would silently become another type."""
        return tuple(tensor for tensor in self.tensors if tensor.type != tensor.wanted)


@dataclass(frozen=True)
class Check:
    """The answer to "can this engine run it": diagnostics, and the grid of sizes per role on its fast path."""

    diagnostics: tuple[Diagnostic, ...]
    grid: Mapping[Role, Grid]
    host: str


@dataclass(frozen=True)
class Measured:
    """One bench of one artifact: medians over rounds, with every round kept. Seconds, tokens per second, bytes."""

    ttft: float
    tpot: float
    throughput: float
    memory: int
    rounds: Mapping[str, Sequence[float]]
    engine: EngineInfo
    details: Mapping[str, Any] = field(default_factory=dict)


class CostModel(ABC):
    """Predicts what an Arch costs in one engine on one device, in one number format."""

    @abstractmethod
    def predict(self, shape: ModelShape, workload: Workload) -> Costs:
        """Costs of a model of that shape, with error bands and provenance."""


class Session(ABC):
    """An artifact loaded in the engine's child process."""

    @abstractmethod
    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits of every position, float32 [tokens, vocab]."""

    @abstractmethod
    def generate(self, tokens: Sequence[int], count: int) -> list[int]:
        """`count` tokens, greedily."""

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """The engine's own tokens of a text, special tokens parsed, no BOS added."""

    @abstractmethod
    def time(self, workload: Workload) -> tuple[float, float]:
        """One round: seconds to the first token after the prompt (TTFT), and per output token after it (TPOT)."""

    @abstractmethod
    def memory(self) -> Mapping[str, int]:
        """Bytes that the engine reports, by buffer: weights, kv, compute, output; `total` is their sum."""


class Backend(ABC):
    """One engine. Class attributes: its `name` in targets, the contract's `api` number, the artifact it loads."""

    name: ClassVar[str]
    api: ClassVar[int] = 1
    artifact: ClassVar[str]

    @abstractmethod
    def engines(self) -> list[EngineInfo]:
        """Usable installations on this machine, preferred first; empty if there is none."""

    def engine(self, target: Target) -> EngineInfo | None:
        """The installation that this target is run with; the preferred one unless its options say otherwise."""
        return next(iter(self.engines()), None)

    def serve(self, artifact: Path, target: Target) -> tuple[str, ...]:
        """Commands by which the engine itself serves an artifact, for people to copy."""
        return ()

    def build(self, source: Path | None = None) -> EngineInfo:
        """Build the engine for this machine, from a source tree that is here or one that is fetched."""
        raise AccError.of("ACC340", self.name, "acc cannot build this engine", "`acc doctor` says how to get it")

    @abstractmethod
    def doctor(self) -> list[Diagnostic]:
        """What is missing or unusable, each with the command that mends it."""

    @abstractmethod
    def check(self, ir: ModelIR, target: Target) -> Check:
        """What would convert, on what grid; needs no weights and no engine."""

    @abstractmethod
    def plan(self, ir: ModelIR, quant: str) -> LoweringPlan:
        """What `lower` would write for this Arch, to the byte."""

    @abstractmethod
    def lower(
        self, ir: ModelIR, weights: Path, quant: str, out: Path, ctx: Context, moments: Path | None = None
    ) -> LoweringPlan:
        """Write the artifact `out` from the (already cut) Hugging Face folder `weights`; `moments` weigh its errors."""

    @abstractmethod
    def dequantized(self, artifact: Path, weights: Path, out: Path, ir: ModelIR) -> None:
        """Write the Hugging Face folder whose weights are those stored in `artifact`, for parity checks in PyTorch."""

    def imitate(self, model: Any, artifact: Path, ir: ModelIR) -> None:
        """Make a PyTorch model round as the engine's own arithmetic does with this artifact; by default not at all.

        Args:
            model: of the folder that `dequantized` wrote from `artifact`; it is changed in place.
        """
        return

    @abstractmethod
    def open(self, artifact: Path, target: Target, *, context: int, batch: int = 1) -> AbstractContextManager[Session]:
        """Load an artifact in a child process, closed at the end of the `with`."""

    @abstractmethod
    def profile(self, ir: ModelIR, target: Target, ctx: Context) -> Artifact:
        """Measure (or resume measuring) the cost table for this family's shapes on this device."""

    def validate(
        self, ir: ModelIR, target: Target, ctx: Context, table: CostTable | None, count: int = 10
    ) -> tuple[CostTable, ValidationResult]:
        """Measure `count` random architectures that no fit has seen, and compare them with what a table predicts.

        Without a table, one is measured in the same rounds as they are.

        Returns:
            The table that was judged, and what was found.

        Raises:
            AccError: ACC604 if the backend cannot.
        """
        from acc.diag import AccError

        hint = "leave --validate away; `acc bench` compares one bundle with its prediction"
        raise AccError.of("ACC604", self.name, "this backend measures no held-out architectures", hint)

    @abstractmethod
    def cost_model(self, table: Path | None, ir: ModelIR, target: Target) -> CostModel:
        """The cost model of a measured or imported table; without one, an estimate from the device's data sheet."""


def _product(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
