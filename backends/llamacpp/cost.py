"""The cost model of llama.cpp: work of a shape (`work`) at measured rates (`acc.costfit`), memory by arithmetic.

Without a table of this device, rates come from its data sheet: the roofline time of each class of work, divided by the
utilisation that the same engine reached on the nearest device that was measured (`utilisation.json`, made by
`tools/measure_utilisation.py`). Such figures say `estimated`, and on what they rest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from acc.backend_api import CostModel
from acc.backends.llamacpp import types
from acc.backends.llamacpp.memory import memory
from acc.backends.llamacpp.options import options_for
from acc.backends.llamacpp.work import Body, Family, decode_work, prefill_work
from acc.cost import Costs, CostTable, Figure, Kind, Sample, Source, throughput
from acc.costfit import Rates, Work, fit
from acc.diag import AccError
from acc.ir import ModelIR, ModelShape
from acc.target import Device, Target, Workload

KINDS: tuple[Kind, Kind] = ("prefill", "decode")
BARRIER = 1e-6
"""The unit in which the fixed cost of a sub-block is told: about one barrier between two threads, in seconds."""
CACHES = (math.inf, *(size << 20 for size in (8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 128, 192, 256, 384)))
"""Sizes of what stays in the processor's caches that the fit tries; a virtual machine does not tell its share."""
ESTIMATE_ERROR = 0.5
"""Band of an estimate from a data sheet where no validation says better."""
BATCH_ERROR = 0.3
"""Band of batches above 1, which no probe measures."""


@dataclass(frozen=True)
class LlamaCppCostModel(CostModel):
    """Predicts what a shape costs in llama.cpp.

    Attributes:
        rates: of prompts and of decoding.
        source: `interpolated` from a measured table, or `estimated`.
        note: what the rates rest on.
        reach: the longest prompt and the greatest depth that were measured; beyond it a figure is an estimate.
        validated: p90 of the errors on held-out models, by cost, where the table was validated.
        cache: bytes that stay in the processor's caches between tokens, as fitted.
    """

    family: Family
    target: Target
    rates: Mapping[Kind, Rates]
    source: Source
    note: str
    reach: tuple[int, int]
    validated: Mapping[str, float]
    cache: float = math.inf

    def predict(self, shape: ModelShape, workload: Workload) -> Costs:
        """Costs of a shape: TTFT of the whole prompt, TPOT at the middle of the output, memory for what is held."""
        body = self.family.body(shape, self.target.quant)
        options = options_for(self.target, context=workload.held, batch=workload.batch)
        ttft = workload.batch * self._seconds(
            "prefill", prefill_work(body, workload.prompt, options.ubatch, self.cache)
        )
        depth = workload.prompt + workload.output / 2
        tpot = self._decode(body, depth, workload.batch, threads_of(self.target))
        held = memory(body, options)
        source: Source = self.source if max(workload.prompt, depth) <= max(self.reach) else "estimated"
        first = Figure(ttft, "s", source, self._error("prefill", "ttft", workload), self.note)
        error = self._error("decode", "tpot", workload)
        return Costs(
            first,
            Figure(tpot, "s", source, error, self.note),
            Figure(throughput(workload.batch, tpot), "tok/s", source, error, self.note),
            Figure(
                held.total,
                "B",
                self._memory_source(),
                max(held.band / held.total, self.validated.get("memory", 0.0)),
                "",
            ),
        )

    def _seconds(self, kind: Kind, work: Work) -> float:
        return self.rates[kind].predict(work)

    def _decode(self, body: Body, depth: float, batch: int, threads: int) -> float:
        """Seconds of one step; in a batch a matrix is read once, and multiplied for each request as in a prompt."""
        work = dict(decode_work(body, depth, batch, self.cache, threads))
        if batch == 1:
            return self._seconds("decode", work)
        columns = prefill_work(body, batch, batch)
        total = 0.0
        for name in {t.type for t in body.matrices}:
            read = self._seconds("decode", {f"read.{name}": work.pop(f"read.{name}", 0.0)})
            total += max(read, self._seconds("prefill", {f"multiply.{name}": columns.get(f"multiply.{name}", 0.0)}))
        return total + self._seconds("decode", work)

    def _error(self, kind: Kind, name: str, workload: Workload) -> float:
        error = self.validated.get(name, self.rates[kind].error)
        return max(error, BATCH_ERROR) if workload.batch > 1 else error

    def _memory_source(self) -> Source:
        return "interpolated" if self.target.device.kind == "cpu" else "estimated"


def cost_model(table: Path | None, ir: ModelIR, target: Target) -> CostModel:
    """The cost model of a measured or imported table; without one, an estimate from the device's data sheet.

    Raises:
        AccError: ACC601 a bad table; ACC602 one of another engine, family, device or number format.
    """
    family = Family(ir)
    types.mix(target.quant)
    if table is None:
        return estimate(family, target)
    return from_table(CostTable.load(table), family, target, str(table))


def from_table(table: CostTable, family: Family, target: Target, where: str) -> LlamaCppCostModel:
    """The model of a table. Raises AccError ACC602 if the table is of something else than the target."""
    check_table(table, family, target, where)
    rates, cache = fit_table(table, family, target)
    reach = (
        max(sample.tokens for sample in table.select(target.quant, "prefill")),
        max(sample.depth for sample in table.select(target.quant, "decode")),
    )
    made = table.provenance
    note = (
        f"measured on {made.device} with {made.engine} {made.engine_version}, {made.threads} threads, {made.date[:10]}"
    )
    validated = table.validation.p90 if table.validation else {}
    return LlamaCppCostModel(family, target, rates, "interpolated", note, reach, validated, cache)


def check_table(table: CostTable, family: Family, target: Target, where: str) -> None:
    """Refuse a table of another engine, family, device or number format."""
    made = table.provenance
    for what, has, wants in (
        ("engine", made.engine, "llamacpp"),
        ("model family", table.family, family.name),
        ("device", made.device, target.device.name),
    ):
        if has != wants:
            hint = "measure one with `acc profile`, or choose the target that the table was measured for"
            raise AccError.of(
                "ACC602", where, f"this cost table is of the {what} `{has}`, and the target needs `{wants}`", hint
            )
    for kind in KINDS:
        if not table.select(target.quant, kind):
            held = ", ".join(table.formats())
            hint = f"measure it with `acc profile --quant {target.quant}`"
            raise AccError.of(
                "ACC602", where, f"this cost table has no {kind} samples at {target.quant} (it holds {held})", hint
            )
    depths = {len(sample.shape.layers) for sample in table.samples}
    if depths != {family.depth}:
        hint = "measure one for this model with `acc profile`"
        raise AccError.of(
            "ACC602", where, f"this cost table is of models with {depths} layers, this one has {family.depth}", hint
        )


def threads_of(target: Target) -> int:
    """Threads that wait for each other in a step; a GPU spreads its work evenly."""
    return options_for(target, context=1, batch=1).threads if target.device.kind == "cpu" else 1


def fit_table(
    table: CostTable, family: Family, target: Target, caches: Sequence[float] = CACHES
) -> tuple[dict[Kind, Rates], float]:
    """Rates of a table's samples in the target's format, and the size of the caches that explains them best."""
    ubatch = options_for(target, context=1, batch=1).ubatch

    def fitted(kind: Kind, cache: float) -> Rates:
        samples = table.select(target.quant, kind)
        works = [work_of(family, sample, ubatch, cache, threads_of(target)) for sample in samples]
        return fit(works, [sample.seconds for sample in samples], [sample.shape for sample in samples])

    cache = min(caches, key=lambda size: fitted("decode", size).residual)
    return {kind: fitted(kind, cache) for kind in KINDS}, cache


def work_of(family: Family, sample: Sample, ubatch: int, cache: float, threads: int) -> Work:
    """The work that a sample measured."""
    body = family.body(sample.shape, sample.quant)
    if sample.kind == "decode":
        return decode_work(body, sample.depth, 1, cache, threads)
    return prefill_work(body, sample.tokens, ubatch, cache)


# Without a table -----------------------------------------------------------------------------------------------------


def roofline(device: Device) -> Callable[[str], float]:
    """Seconds per unit of a class of work at the data sheet's best: full bandwidth, full multiplication rate."""
    flops = max(device.flops.get(name, 0.0) for name in ("f16", "bf16", "f32"))

    def seconds(name: str) -> float:
        if name.startswith("read."):
            return 1 / device.bandwidth
        if name.startswith("multiply.") or name in ("scores", "cache"):
            # A score or a cached value is multiplied twice: with the query, and with its weight.
            return (4.0 if name in ("scores", "cache") else 2.0) / flops
        if name in ("elements", "rows"):
            return 4 / device.bandwidth
        return BARRIER

    return seconds


@lru_cache(maxsize=1)
def utilisation() -> Mapping[str, Any]:
    """What share of the roofline was reached on the devices that were measured: `{"devices": {name: ...}}`."""
    text = resources.files("acc.backends.llamacpp").joinpath("utilisation.json").read_text("utf-8")
    found: Mapping[str, Any] = json.loads(text)
    return found


def estimate(family: Family, target: Target) -> LlamaCppCostModel:
    """Rates from the data sheet and the utilisation of the nearest measured device: same kind, then any."""
    measured = utilisation()["devices"]
    names = sorted(measured, key=lambda name: (measured[name]["kind"] != target.device.kind, name))
    nearest = measured[names[0]]
    seconds = roofline(target.device)
    # What a GPU loses at every sub-block is no matter of its data sheet: kernels wait for each other.
    launch = utilisation()["launch"].get(target.device.kind)
    fixed = dict.fromkeys(("attention", "ffn"), launch["seconds"]) if launch else {}
    used = target.quant if target.quant in nearest["formats"] else next(iter(nearest["formats"]))
    shares = nearest["formats"][used]
    rates: dict[Kind, Rates] = {}
    for kind in KINDS:
        known = shares[kind]
        of_type = {
            prefix: sum(found) / len(found)
            for prefix in ("read", "multiply")
            if (found := [share for name, share in known.items() if name.startswith(prefix + ".")])
        }
        rates[kind] = Rates(_Estimated(seconds, known, of_type, fixed), ESTIMATE_ERROR, ESTIMATE_ERROR)
    note = (
        f"no table of {target.device.name}: data sheet x utilisation of llama.cpp measured on {names[0]} "
        f"({nearest['date'][:10]}, {used})"
    )
    return LlamaCppCostModel(family, target, rates, "estimated", note, (0, 0), {})


class _Estimated(dict[str, float]):
    """Seconds per unit of work: roofline over utilisation; the mean of the others for a type not measured."""

    def __init__(
        self,
        seconds: Callable[[str], float],
        known: Mapping[str, float],
        of_type: Mapping[str, float],
        fixed: Mapping[str, float],
    ) -> None:
        super().__init__()
        self._seconds, self._known, self._of_type, self._fixed = seconds, known, of_type, fixed

    def get(self, name: str, default: Any = None) -> Any:
        if name in self._fixed:
            return self._fixed[name]
        share = self._known.get(name) or self._of_type.get(name.partition(".")[0], 1.0)
        # Caches and narrow integers beat the roofline of one device; that is no reason to expect it of another.
        return self._seconds(name) / min(share, 1.0)
