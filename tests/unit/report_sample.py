"""A report with made-up figures, for tests of how reports are written and drawn."""

from __future__ import annotations

from acc.backend_api import EngineInfo, LoweringPlan, Measured, TensorPlan
from acc.cost import Costs, Figure, Source
from acc.diag import Diagnostic
from acc.ir import LayerShape, ModelShape
from acc.report.data import (
    Attempt,
    Machine,
    Parity,
    Quality,
    Report,
    Side,
    Stage,
    TypeCount,
    limit_lines,
)
from acc.target import Device, Limit, Target, Workload

ENGINE = EngineInfo("llamacpp", "wheel", "b1234", "AVX512 VNNI", "/opt/engine", ("run", "logits"))
LIMITS = (Limit("tpot", 0.7, relative=True), Limit("memory", 150e6), Limit("ttft", 0.5))


def costs(scale: float, source: Source = "interpolated", error: float = 0.05) -> Costs:
    """Costs that scale with one factor."""
    return Costs(
        Figure(0.21 * scale, "s", source, error),
        Figure(0.0066 * scale, "s", source, error),
        Figure(150 / scale, "tok/s", source, error),
        Figure(170e6 * scale, "B", source, 0.0),
    )


def measured(scale: float) -> Measured:
    """A bench of five rounds around one factor."""
    tpot = [0.0066 * scale * wobble for wobble in (1.0, 1.02, 0.99, 1.05, 0.98)]
    ttft = [0.21 * scale * wobble for wobble in (1.0, 1.01, 0.97, 1.03, 1.02)]
    rounds = {"tpot": tpot, "ttft": ttft}
    return Measured(ttft[0], tpot[0], 150 / scale, int(170e6 * scale), rounds, ENGINE)


def side(name: str, shape: ModelShape, scale: float, *, here: bool = True) -> Side:
    """One side whose costs follow one factor."""
    plan = LoweringPlan(
        "deci",
        (
            TensorPlan("blk.0.ffn_down.weight", (1536, 576), "Q5_0", "Q4_K", 608256),
            TensorPlan("blk.0.ffn_up.weight", (512, 1536), "Q4_K", "Q4_K", 442368),
        ),
        file_bytes=int(104e6 * scale),
    )
    return Side(
        name=name,
        shape=shape,
        parameters=int(134.5e6 * scale),
        quant="q4_k_m",
        host=plan.host,
        planned_bytes=plan.file_bytes,
        file_bytes=plan.file_bytes,
        bits_per_weight=plan.bits_per_weight,
        types={
            "Q5_0": TypeCount(tensors=180, weights=90_000_000, bytes=int(60e6 * scale)),
            "Q4_K": TypeCount(tensors=60, weights=40_000_000, bytes=int(30e6 * scale)),
            "Q8_0": TypeCount(tensors=1, weights=28_000_000, bytes=int(14e6 * scale)),
            "F32": TypeCount(tensors=61, weights=35_136, bytes=140_544),
        },
        fallbacks=plan.fallbacks,
        predicted=costs(scale, "interpolated" if here else "estimated"),
        measured=measured(scale * 0.98) if here else None,
    )


def sample(*, here: bool = True) -> Report:
    """A report of a model cut unevenly; `here`: on this machine, so measured."""
    whole = ModelShape(576, 49152, 64, tuple(LayerShape(9, 3, 1536) for _ in range(30)), tied=True)
    cut = [LayerShape(9 if i % 4 else 6, 3 if i % 4 else 2, 768 + 128 * (i % 5)) for i in range(30)]
    cut[7], cut[11], cut[12] = LayerShape(0, 0, 0), LayerShape(0, 0, 896), LayerShape(9, 3, 0)
    small = ModelShape(512, 49152, 64, tuple(cut), tied=True)
    parent, child = side("SmolLM2-135M-Instruct.gguf", whole, 1.0, here=here), side("out", small, 0.66, here=here)
    device = Device("cpu", "cpu", 24 << 30, 40e9, {"f32": 2e11}, "detected", here=here, threads=2)
    return Report(
        command="acc compile SmolLM2-135M-Instruct.gguf --target cpu-llamacpp --tpot 0.7x",
        model="SmolLM2-135M-Instruct.gguf",
        family="llama",
        target=Target("cpu-llamacpp", device, "llamacpp", Workload("chat", 128, 64), LIMITS),
        pipeline="calibrate{tokens=16384},order,profile,puzzle{tpot=0.7x},slice,refit,lower-gguf,verify,bench",
        engine=ENGINE if here else None,
        parent=parent,
        child=child,
        limits=limit_lines(LIMITS, parent, child),
        quality=(
            Quality(
                what="parent, float32", model="parent", perplexity=2.547, kl_nats=None, tokens=12288, text="heldout"
            ),
            Quality(what="child, float32", model="child", perplexity=2.9, kl_nats=0.16, tokens=12288, text="heldout"),
        ),
        parity=(
            Parity(
                artifact="F16",
                reference="float32",
                kl_nats=2e-6,
                kl_limit_nats=1e-4,
                tokens=512,
                greedy_match=64,
                greedy_tokens=64,
            ),
            Parity(artifact="Q4_K_M", reference="dequantized", kl_nats=3e-4, kl_limit_nats=1e-3, tokens=512),
        ),
        attempts=(Attempt(shape=small, predicted=costs(0.69), measured=measured(0.74), note="TPOT missed by 6 %"),)
        if here
        else (),
        notes=(
            Diagnostic("LC020", "blk.0.ffn_down.weight", "Q4_K needs rows of 256", "choose hidden 512", "warning"),
            Diagnostic("LC020", "blk.1.ffn_down.weight", "Q4_K needs rows of 256", "choose hidden 512", "warning"),
            Diagnostic("ACC210", "lm_head", "tied to <the embedding> & not cut", level="note"),
        ),
        stages=(
            Stage(name="calibrate", spec="calibrate{tokens=16384}", seconds=31.2, peak_memory_bytes=1_400_000_000),
            Stage(name="puzzle", spec="puzzle{tpot=0.7x}", seconds=142.0, peak_memory_bytes=2_100_000_000),
            Stage(name="bench", spec="bench", seconds=12.0, cached=True),
        ),
        machine=Machine(processor="x86-64", cores=2, memory_bytes=24 << 30, system="Linux", python="3.11.7"),
        versions={"acc": "0.1.0", "torch": "2.13.0"},
        date="2026-12-01T14:00:00Z",
        run=('acc run out "Hello"',),
        facts={"puzzle": {"kl_nats": 0.16}},
    )
