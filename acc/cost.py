"""Cost tables (measured) and the cost model fitted to them: an Arch and a workload to TTFT, TPOT, throughput, memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from acc.ir import ModelShape
from acc.target import Workload

Source = Literal["measured", "interpolated", "estimated"]


@dataclass(frozen=True)
class Figure:
    """A number with its unit, its error band and where it comes from.

    Attributes:
        value: seconds, tokens per second or bytes, as `unit` says.
        error: half-width of the band as a fraction of the value (the p90 of validation; 0 where exact).
    """

    value: float
    unit: str
    source: Source
    error: float = 0.0


@dataclass(frozen=True)
class Costs:
    """What serving one Arch under one workload costs. TTFT and TPOT in seconds, throughput in tok/s, memory in bytes."""

    ttft: Figure
    tpot: Figure
    throughput: Figure
    memory: Figure


@dataclass(frozen=True)
class Sample:
    """One measurement of one probe model in the engine: `seconds` (median) for `tokens` at `depth`, with its spread."""

    shape: ModelShape
    quant: str
    kind: Literal["prefill", "decode"]
    tokens: int
    depth: int
    seconds: float
    spread: float


@dataclass(frozen=True)
class Provenance:
    """Under what a table was measured: device, engine with version and build flags, threads, date, noise seen, seconds taken."""

    device: str
    engine: str
    engine_version: str
    build: str
    threads: int
    date: str
    noise: float
    seconds: float
    details: Mapping[str, Any]
