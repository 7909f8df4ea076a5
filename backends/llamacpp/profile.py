"""Measuring a cost table: a dozen probe models that together tell the rates apart, timed in interleaved rounds."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from statistics import median
from typing import TYPE_CHECKING

from acc.backends.llamacpp.cost import threads_of
from acc.backends.llamacpp.draws import Draws, shape_key
from acc.backends.llamacpp.measure import FORMAT, Job, Record, Schedule, Timing, run, timing
from acc.backends.llamacpp.options import options_for
from acc.backends.llamacpp.plan import check
from acc.backends.llamacpp.work import Family, decode_work, prefill_work
from acc.cost import CostTable, MemorySample, Provenance, Sample
from acc.costfit import choose

if TYPE_CHECKING:
    from acc.ir import Artifact, ModelIR, ModelShape
    from acc.passes_api import Context
    from acc.target import Target

PROBES = 12
CANDIDATES = 200
SECONDS = 155.0
"""Probes whose medians are not known well enough are visited again for so long."""
PARENT = "parent"


def profile(ir: ModelIR, target: Target, ctx: Context) -> Artifact:
    """Measure the cost table of this family's shapes, going on from what a killed run left in `ctx.scratch`.

    Raises:
        AccError: no host for the family, no engine, or whatever goes wrong in it.
    """
    started = time.monotonic()
    schedule = schedule_of(target)
    jobs = {name: Job(one, schedule) for name, one in design(ir, target, ctx.seed).items()}
    record = Record(ctx.scratch / "visits.jsonl", plan_key(jobs, target))
    left = sum(not record.of(name) for name in jobs)
    seconds = expected_seconds(ir, schedule, target, left)
    told = f"{len(jobs)} probe models, about {seconds:.0f} s on a quiet machine"
    ctx.progress(0, len(jobs) * schedule.rounds, told)
    run(jobs, target, record, ctx.progress)
    table_of(record, jobs, target, ir.family, time.monotonic() - started).save(ctx.scratch / "table.json")
    return ctx.artifact("table.json")


def design(ir: ModelIR, target: Target, seed: int, count: int = PROBES) -> dict[str, ModelIR]:
    """The probes by name: the parent, and those of many random architectures that tell the most about the rates."""
    family = Family(ir)
    draws = Draws(ir, check(ir, target).grid, seed)
    candidates = list({one.model_shape(): one for one in (ir, *(draws.draw() for _ in range(CANDIDATES)))}.values())
    schedule = schedule_of(target)
    ubatch = options_for(target, context=schedule.context, batch=1).ubatch
    works = []
    for candidate in candidates:
        body = family.body(candidate.model_shape(), target.quant)
        steps = [decode_work(body, schedule.depth(prompt), threads=threads_of(target)) for prompt in schedule.prompts]
        decoding = [{f"decode {name}": amount for name, amount in work.items()} for work in steps]
        works.append(decoding + [prefill_work(body, prompt, ubatch) for prompt in schedule.prompts])
    chosen = choose(works, count)
    return {PARENT: ir, **{f"probe-{number:02}": candidates[index] for number, index in enumerate(chosen[1:], 1)}}


def schedule_of(target: Target) -> Schedule:
    """Prompts around the workload's own; longer than 1024 takes too long here, and is extrapolated."""
    own = min(max(target.workload.prompt, 64), 512)
    return Schedule((max(16, own // 4), own, min(4 * own, 1024)), seconds=SECONDS)


def expected_seconds(ir: ModelIR, schedule: Schedule, target: Target, probes: int) -> float:
    """How long measuring takes on a quiet machine, roughly, by the device's speed; most probes are small."""
    weights, device = ir.parameters(), target.device
    token = 2 * weights / max(max(device.flops.values(), default=0.0), 1e9)
    step = weights / max(device.bandwidth, 1e9)
    steps = len(schedule.prompts) * (schedule.warming + schedule.steps)
    return probes * (1.5 + schedule.rounds * 0.6 * (sum(schedule.prompts) * token + steps * step))


def plan_key(jobs: Mapping[str, Job], target: Target) -> str:
    """What the visits of a run belong to; a record of another plan is not taken over."""
    plan = {
        name: [shape_key(job.ir.model_shape()), job.schedule.prompts, job.schedule.warming, job.schedule.steps]
        for name, job in jobs.items()
    }
    told = [FORMAT, plan, target.quant, target.device.name, dict(target.engine_options)]
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()


def table_of(record: Record, jobs: Mapping[str, Job], target: Target, family: str, seconds: float) -> CostTable:
    """The table of finished probes."""
    samples: list[Sample] = []
    memory: list[MemorySample] = []
    timings = {name: timing(record.of(name), job.schedule.prompts) for name, job in jobs.items()}
    for name, job in jobs.items():
        shape = job.ir.model_shape()
        samples += _samples(shape, timings[name], job.schedule, target.quant)
        memory.append(MemorySample(shape, target.quant, job.schedule.context, 1, record.memory[name]))
    engine = record.details["engine"]
    visits = sum(found.visits for found in timings.values())
    made = Provenance(
        device=target.device.name,
        engine="llamacpp",
        engine_version=engine["version"],
        build=engine["build"],
        threads=int(record.details["threads"]),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        noise=median(sample.spread for sample in samples),
        seconds=round(seconds, 1),
        details={
            "origin": engine["origin"],
            "visits": visits,
            "visits_quiet": sum(found.quiet for found in timings.values()),
            "options": {k: record.details.get(k) for k in ("batch", "ubatch", "flash_attn_used", "type_k", "type_v")},
        },
    )
    return CostTable(made, family, tuple(samples), tuple(memory))


def _samples(shape: ModelShape, found: Timing, schedule: Schedule, quant: str) -> list[Sample]:
    samples = []
    for prompt in schedule.prompts:
        samples.append(Sample(shape, quant, "prefill", prompt, 0, found.first[prompt], found.first_spread[prompt]))
        depth = schedule.depth(prompt)
        samples.append(Sample(shape, quant, "decode", 1, depth, found.step[prompt], found.step_spread[prompt]))
    return samples
