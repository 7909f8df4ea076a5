"""What the tests of passes share: a tiny model traced and calibrated, contexts, and a cost model that counts bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from acc.backend_api import Backend, Check, CostModel, Grid
from acc.cost import Costs, Figure, throughput
from acc.ir import Artifact, ModelIR, ModelShape, Role
from acc.passes_api import Context, Pass
from acc.target import Device, Limit, Target, Workload

STREAM = 10e9
"""Bytes per second that the counting cost model reads weights at."""


def silent(step: int, total: int, what: str = "") -> None:
    """A progress that nobody watches."""


@dataclass(frozen=True)
class CountingCosts(CostModel):
    """A decoder bound by memory: seconds are bytes of weights over a bandwidth, with a fixed cost per layer."""

    per_layer: float = 2e-7

    def predict(self, shape: ModelShape, workload: Workload) -> Costs:
        weights = shape.vocab * shape.hidden * (1 if shape.tied else 2)
        for layer in shape.layers:
            attention = 2 * shape.hidden * shape.head_dim * (layer.heads + layer.kv_heads)
            weights += attention + 3 * shape.hidden * layer.ffn
        depth = sum(not layer.dropped for layer in shape.layers)
        tpot = 2 * weights / STREAM + self.per_layer * depth
        memory = 2 * weights + workload.held * shape.kv_bytes_per_token()
        return Costs(
            Figure(workload.prompt * tpot / 4, "s", "estimated", 0.05),
            Figure(tpot, "s", "estimated", 0.05),
            Figure(throughput(workload.batch, tpot), "tok/s", "estimated", 0.05),
            Figure(memory, "B", "estimated"),
        )


@dataclass
class CountingBackend:
    """The two methods of a backend that a search asks."""

    grid: Mapping[Role, Grid]

    def check(self, ir: ModelIR, target: Target) -> Check:
        return Check((), self.grid, "any")

    def cost_model(self, table: Path | None, ir: ModelIR, target: Target) -> CostModel:
        return CountingCosts()


def grid(**steps: int) -> dict[Role, Grid]:
    """A grid with these steps; sub-blocks may be dropped."""
    found: dict[Any, Grid] = {role: Grid(cast(Role, role), step, step) for role, step in steps.items()}
    return found | {"attn": Grid("attn", 1, 0), "mlp": Grid("mlp", 1, 0)}


def target(*limits: str) -> Target:
    """A target with limits such as `tpot=0.7x`."""
    device = Device("test", "cpu", 1 << 34, STREAM, {}, "test")
    parsed = tuple(Limit.parse(cast(Any, name), value) for name, _, value in (one.partition("=") for one in limits))
    return Target("test", device, "counting", Workload("test", 64, 16), parsed, "f16")


@dataclass
class Bench:
    """Runs passes one after the other, as the manager would, without its checks."""

    ir: ModelIR
    folder: Path
    backend: CountingBackend | None = None
    target: Target | None = None
    code: str = ""
    """Runs with the same code share their partial results; without, none do."""

    def run(self, one: Pass) -> Mapping[str, Any]:
        """Run a pass; the model goes on, the facts come back."""
        key = f"{len(list(self.folder.iterdir())):03d}-{one.name}"
        scratch = self.folder / key
        scratch.mkdir()
        backend = cast("Backend | None", self.backend)
        context = Context(self.folder, scratch, key, self.target, backend, 0, silent, code=self.code or key)
        result = one.run(self.ir, context)
        self.ir = result.ir
        return result.facts

    def path(self, kind: str) -> Path:
        """Where an artifact lies."""
        return self.folder / self.ir.artifacts[kind].path

    def branch(self) -> Bench:
        """Another line of passes from here."""
        return replace(self)


def traced(folder: Path) -> ModelIR:
    """The IR of a model folder with `parent` and `weights` set."""
    from acc.checkpoint import Checkpoint
    from acc.trace import trace

    own = Artifact(str(folder), folder.name)
    return trace(Checkpoint.at(folder).config).with_artifacts(parent=own, weights=own)
