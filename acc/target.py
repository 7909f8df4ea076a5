"""Targets: device + engine + workload + limits, read from TOML (`acc/targets/*.toml`, entry points `acc.targets`, a user's file)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

LimitName = Literal["ttft", "tpot", "throughput", "memory"]
LIMIT_UNITS: dict[LimitName, str] = {"ttft": "s", "tpot": "s", "throughput": "tok/s", "memory": "B"}


@dataclass(frozen=True)
class Device:
    """Hardware.

    Attributes:
        memory_bytes, bandwidth (bytes/s), flops (dense FLOP/s by number format): data-sheet figures, or detected.
        source: where the figures come from; "detected" for this machine.
        here: whether this machine is it, so that it can be measured.
    """

    name: str
    kind: Literal["cpu", "gpu"]
    memory_bytes: int
    bandwidth: float
    flops: Mapping[str, float]
    source: str
    here: bool = False
    threads: int = 0


@dataclass(frozen=True)
class Workload:
    """What is served: prompt and output tokens per request, requests at once, context to hold."""

    name: str
    prompt: int
    output: int
    batch: int = 1
    context: int = 0

    @property
    def held(self) -> int:
        """Tokens of context that memory must hold per sequence."""
        return self.context or self.prompt + self.output


@dataclass(frozen=True)
class Limit:
    """One limit; `relative` ones are multiples of the parent's measurement in the same engine.

    Units: seconds for ttft and tpot, tokens per second for throughput, bytes for memory.
    """

    name: LimitName
    value: float
    relative: bool = False

    def resolve(self, parent: float) -> Limit:
        """The absolute limit, given the parent's measured (or predicted) value."""
        return Limit(self.name, self.value * parent) if self.relative else self

    def violation(self, value: float) -> float:
        """How far a value breaks an absolute limit, as a fraction of it; at most 0 when it is kept."""
        over = value / self.value - 1
        return -over if self.name == "throughput" else over


@dataclass(frozen=True)
class Target:
    """Where the model must be served, in which number format, and the limits there."""

    name: str
    device: Device
    engine: str
    workload: Workload
    limits: tuple[Limit, ...] = ()
    quant: str = "q4_k_m"
    engine_options: Mapping[str, Any] = field(default_factory=dict)
