"""Cost tables (measured) and what is predicted from them: TTFT, TPOT, throughput, memory, with bands and provenance.

A table is one JSON file that people can read, keep and send to each other. It holds what was measured and under what;
what a backend fits to it (`acc.costfit`) is computed anew by whoever reads it. A table that comes from elsewhere is
untrusted input.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from acc.diag import AccError
from acc.ir import LayerShape, ModelShape

Source = Literal["measured", "interpolated", "estimated"]
Kind = Literal["prefill", "decode"]

FORMAT = "acc cost table 1"
MAX_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Figure:
    """A number with its unit, its error band and where it comes from.

    Attributes:
        value: seconds, tokens per second or bytes, as `unit` says.
        error: half-width of the band as a fraction of the value (the p90 of validation; 0 where exact).
        note: what the number rests on, in one sentence, where its source alone does not say it.
    """

    value: float
    unit: str
    source: Source
    error: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class Costs:
    """What serving one Arch under one workload costs. TTFT, TPOT in seconds, throughput in tok/s, memory in bytes."""

    ttft: Figure
    tpot: Figure
    throughput: Figure
    memory: Figure


@dataclass(frozen=True)
class Sample:
    """One measurement of one probe model in the engine.

    Attributes:
        shape: of the probe, as the Arch has it (what the file pads is the lowering's matter).
        quant: its number format.
        kind: `prefill`: a prompt of `tokens` on an empty cache; `decode`: one token at `depth`.
        seconds: what the rounds come to, as the backend says (see its `measure`).
        spread: half the distance between the quartiles of the rounds, as a fraction of `seconds`.
    """

    shape: ModelShape
    quant: str
    kind: Kind
    tokens: int
    depth: int
    seconds: float
    spread: float


@dataclass(frozen=True)
class MemorySample:
    """Bytes that the engine reported for one probe, by buffer, when it was opened for a context of so many tokens."""

    shape: ModelShape
    quant: str
    context: int
    batch: int
    bytes: Mapping[str, int]


@dataclass(frozen=True)
class Provenance:
    """Under what a table was measured: device, engine with version and build flags, threads, date, noise, seconds.

    Attributes:
        noise: the median `spread` of the samples.
        details: engine options, and whatever else the backend thinks worth knowing.
    """

    device: str
    engine: str
    engine_version: str
    build: str
    threads: int
    date: str
    noise: float
    seconds: float
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Validation:
    """How far predictions from a table were off on models outside the fit: median and p90 of the absolute error."""

    models: int
    median: Mapping[str, float]
    p90: Mapping[str, float]
    date: str


@dataclass(frozen=True)
class CostTable:
    """What was measured on one device in one engine, for the shapes of one family."""

    provenance: Provenance
    family: str
    samples: tuple[Sample, ...]
    memory: tuple[MemorySample, ...] = ()
    validation: Validation | None = None

    def formats(self) -> tuple[str, ...]:
        """The number formats that were measured, sorted."""
        return tuple(sorted({sample.quant for sample in self.samples}))

    def select(self, quant: str, kind: Kind) -> tuple[Sample, ...]:
        """The samples of one number format and kind."""
        return tuple(sample for sample in self.samples if sample.quant == quant and sample.kind == kind)

    def validated(self, validation: Validation) -> CostTable:
        """The same table with what a validation found."""
        return replace(self, validation=validation)

    def save(self, path: Path) -> None:
        """Write the file by one rename. Shapes stand once each and samples refer to them by number."""
        shapes = list(dict.fromkeys([*(one.shape for one in self.samples), *(one.shape for one in self.memory)]))
        number: dict[ModelShape, int] = {shape: index for index, shape in enumerate(shapes)}

        def rows(samples: tuple[Sample, ...] | tuple[MemorySample, ...]) -> list[str]:
            return [json.dumps({**asdict(sample), "shape": number[sample.shape]}) for sample in samples]

        head = {
            "format": FORMAT,
            "family": self.family,
            "provenance": asdict(self.provenance),
            "validation": asdict(self.validation) if self.validation else None,
        }
        parts = [json.dumps(head, indent=1)[1:-2]]
        for name, lines in (
            ("shapes", [json.dumps(_shape_json(shape)) for shape in shapes]),
            ("samples", rows(self.samples)),
            ("memory", rows(self.memory)),
        ):
            parts.append(f'\n "{name}": [' + ",".join(f"\n  {line}" for line in lines) + "\n ]")
        partial = path.with_name(path.name + ".partial")
        partial.write_text("{" + ",".join(parts) + "\n}\n", "utf-8")
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> CostTable:
        """Read a file that anybody may have written.

        Raises:
            AccError: ACC601 if it is not a cost table, with the place and the reason.
        """
        from acc.costfile import read

        hint = "make one with `acc profile`, or ask its sender for it again"
        try:
            if path.stat().st_size > MAX_BYTES:
                raise AccError.of("ACC601", str(path), f"a cost table is smaller than {MAX_BYTES >> 20} MiB", hint)
            return read(json.loads(path.read_bytes()))
        except OSError as error:
            raise AccError.of("ACC601", str(path), f"cannot be read ({error.strerror or error})", hint) from error
        except (ValueError, RecursionError) as error:
            reason = " ".join(str(error).split("\n")[:3])[:200]
            raise AccError.of("ACC601", str(path), f"this is not a cost table: {reason}", hint) from error


def throughput(batch: int, tpot: float) -> float:
    """Output tokens per second of all requests together while they decode: batch / TPOT."""
    return batch / tpot if tpot > 0 else math.inf


def _shape_json(shape: ModelShape) -> dict[str, Any]:
    return {
        "hidden": shape.hidden,
        "vocab": shape.vocab,
        "head_dim": shape.head_dim,
        "tied": shape.tied,
        "layers": [[layer.heads, layer.kv_heads, layer.ffn] for layer in shape.layers],
    }


def shape_of_json(data: Mapping[str, Any]) -> ModelShape:
    """The inverse of the file's form of a shape; layers are rows of heads, KV heads and FFN width."""
    layers = tuple(LayerShape(*row) for row in data["layers"])
    return ModelShape(data["hidden"], data["vocab"], data["head_dim"], layers, data["tied"])
