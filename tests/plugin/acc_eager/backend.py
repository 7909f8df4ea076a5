"""PyTorch eager as an engine: it serves the Hugging Face folder itself, in float32, in a child process."""

from __future__ import annotations

import json
import math
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from acc.backend_api import Backend, Check, CostModel, EngineInfo, LoweringPlan, Session, TensorPlan
from acc.cost import Costs, Figure
from acc.diag import AccError, Diagnostic
from acc.ir import Artifact, ModelIR, ModelShape, present_tensors
from acc.model import config_for
from acc.passes_api import Context
from acc.target import Target, Workload
from acc_eager import child

T = TypeVar("T")


class EagerSession(Session):
    """A model in the child process; whatever kills the child becomes a diagnostic here."""

    def __init__(self, pool: ProcessPoolExecutor, context: int) -> None:
        self._pool, self._context = pool, context

    def _ask(self, do: Callable[..., T], *arguments: Any) -> T:
        try:
            return self._pool.submit(do, *arguments).result(timeout=600)
        except BrokenProcessPool as error:
            raise AccError.of("EAGER1", "eager", "the engine's process died", "is there enough memory?") from error

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        return self._ask(child.logits, list(tokens))

    def generate(self, tokens: Sequence[int], count: int) -> list[int]:
        return self._ask(child.generate, list(tokens), count)

    def tokenize(self, text: str) -> list[int]:
        return self._ask(child.tokenize, text)

    def time(self, workload: Workload) -> tuple[float, float]:
        return self._ask(child.seconds, workload.prompt, workload.output)

    def memory(self) -> Mapping[str, int]:
        return self._ask(child.memory, self._context)


class LinearCost(CostModel):
    """Seconds as a line over the weights that a token passes, fitted to the probes; the worst residual is the band."""

    def __init__(self, probes: Sequence[Mapping[str, float]]) -> None:
        weights = np.array([[1.0, probe["weights"]] for probe in probes])
        self._lines, self._errors = {}, {}
        for name in ("ttft", "tpot"):
            seconds = np.array([probe[name] for probe in probes])
            line, *_ = np.linalg.lstsq(weights, seconds, rcond=None)
            self._lines[name], self._errors[name] = line, float(np.max(np.abs(weights @ line - seconds) / seconds))

    def predict(self, shape: ModelShape, workload: Workload) -> Costs:
        weights = passed_weights(shape)
        ttft, tpot = (
            Figure(float(self._lines[name] @ [1.0, weights]), "s", "interpolated", self._errors[name])
            for name in ("ttft", "tpot")
        )
        rate = workload.output / (ttft.value + tpot.value * (workload.output - 1))
        embedding = 0 if shape.tied else shape.vocab * shape.hidden
        return Costs(
            ttft,
            tpot,
            Figure(rate, "tok/s", "interpolated", max(ttft.error, tpot.error)),
            Figure(4 * (weights + embedding), "B", "estimated", 0.5),  # activations are not modelled
        )


class Eager(Backend):
    """PyTorch eager, float32, without a KV cache: slow, and right by definition."""

    name = "eager"
    artifact = "hf"

    def engines(self) -> list[EngineInfo]:
        import torch

        return [
            EngineInfo("eager", "wheel", torch.__version__, "float32", torch.__path__[0], ("run", "logits", "bench"))
        ]

    def doctor(self) -> list[Diagnostic]:
        return []

    def check(self, ir: ModelIR, target: Target) -> Check:
        return Check((), {}, "transformers")

    def plan(self, ir: ModelIR, quant: str) -> LoweringPlan:
        if quant != "f32":
            raise AccError.of("EAGER2", quant, "PyTorch eager serves float32 only", "use --quant f32")
        shapes = {tensor.name: ir.shape(tensor) for tensor in present_tensors(ir)}
        tensors = tuple(TensorPlan(name, shape, "F32", "F32", 4 * math.prod(shape)) for name, shape in shapes.items())
        return LoweringPlan("transformers", tensors, sum(tensor.bytes for tensor in tensors))

    def lower(
        self, ir: ModelIR, weights: Path, quant: str, out: Path, ctx: Context, moments: Path | None = None
    ) -> LoweringPlan:
        plan = self.plan(ir, quant)
        shutil.copytree(weights, out)
        return plan

    def dequantized(self, artifact: Path, weights: Path, out: Path, ir: ModelIR) -> None:
        shutil.copytree(artifact, out)

    @contextmanager
    def open(self, artifact: Path, target: Target, *, context: int, batch: int = 1) -> Iterator[EagerSession]:
        with _session(artifact, target.device.threads, context) as session:
            yield session

    def profile(self, ir: ModelIR, target: Target, ctx: Context) -> Artifact:
        """Time three models of random weights: FFN as it is, a half, a quarter; median of three rounds each."""
        probes = []
        for step, divisor in enumerate((1, 2, 4)):
            cut = ir.resize({dim.name: max(1, dim.size // divisor) for dim in ir.select("ffn", free=True)})
            with _session(config_for(cut), target.device.threads, target.workload.held) as session:
                rounds = [session.time(target.workload) for _ in range(3)]
            ttft, tpot = (statistics.median(values) for values in zip(*rounds, strict=True))
            probes.append({"weights": passed_weights(cut.model_shape()), "ttft": ttft, "tpot": tpot})
            ctx.progress(step + 1, 3, "probe")
        (ctx.scratch / "table.json").write_text(json.dumps(probes))
        return ctx.artifact("table.json")

    def cost_model(self, table: Path | None, ir: ModelIR, target: Target) -> CostModel:
        if table is None:
            raise AccError.of("EAGER3", target.name, "PyTorch eager has no data sheet", "run `acc profile` first")
        return LinearCost(json.loads(table.read_text("utf-8")))


def passed_weights(shape: ModelShape) -> int:
    """Weights of the linear layers and the output layer: what each token is multiplied with."""
    per_layer = (
        2 * shape.hidden * shape.head_dim * (layer.heads + layer.kv_heads) + 3 * shape.hidden * layer.ffn
        for layer in shape.layers
    )
    return sum(per_layer) + shape.vocab * shape.hidden


@contextmanager
def _session(source: Path | Mapping[str, Any], threads: int, context: int) -> Iterator[EagerSession]:
    start = get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=start, initializer=child.load, initargs=(source, threads)) as pool:
        yield EagerSession(pool, context)
