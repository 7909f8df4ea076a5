"""Targets: device + engine + workload + limits. `acc.targetfiles` reads them from TOML."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from acc.diag import AccError, Diagnostic
from acc.quantity import quantity, written

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

    @classmethod
    def parse(cls, name: LimitName, text: str, where: str = "") -> Limit:
        """A limit as written: `8ms`, `6GiB`, `900tok/s`, `0.7x`. Raises AccError ACC401 or ACC402."""
        return cls(name, *quantity(text, LIMIT_UNITS[name], where or f"--{name}", relative=True))

    def __str__(self) -> str:
        return f"{self.value:g}x" if self.relative else written(self.value, LIMIT_UNITS[self.name])

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

    def limit(self, name: LimitName) -> Limit | None:
        """The limit of that name, if there is one."""
        return next((limit for limit in self.limits if limit.name == name), None)

    def with_limits(self, limits: Iterable[Limit]) -> Target:
        """The same target with other limits in place of those of the same name."""
        given = {limit.name: limit for limit in limits}
        kept = {limit.name: limit for limit in self.limits}
        return dataclasses.replace(self, limits=tuple((kept | given).values()))


def check_limits(target: Target) -> None:
    """Raise AccError listing every way in which the limits contradict the device, the workload or themselves.

    ACC403: a contradiction. ACC404: nothing is asked for.
    """
    if not target.limits:
        hint = "give at least one of --ttft, --tpot, --throughput, --memory, e.g. --tpot 0.7x"
        raise AccError.of("ACC404", target.name, "no limit is given, so there is nothing to compile for", hint)
    faults = []
    memory, device = target.limit("memory"), target.device
    if memory and not memory.relative and memory.value > device.memory_bytes:
        message = f"allows {memory}, but {device.name} has only {written(device.memory_bytes, 'B')}"
        faults.append(Diagnostic("ACC403", "--memory", message, "lower the limit or choose another device"))
    if target.limit("tpot") and target.workload.output < 2:
        message = f"limits the time per token after the first, but workload {target.workload.name} has one output token"
        faults.append(Diagnostic("ACC403", "--tpot", message, "limit --ttft, or choose another workload"))
    if all(limit.relative and limit.violation(1.0) <= 0 for limit in target.limits):
        told = ", ".join(f"--{limit.name} {limit}" for limit in target.limits)
        message = f"the parent itself keeps {told}, so nothing is left to do"
        faults.append(Diagnostic("ACC403", "limits", message, "write less than 1x (more than 1x for --throughput)"))
    if faults:
        raise AccError(*faults)
