"""`order`: for every dim that may be cut, its indices from the most important to the least. Orders are nested."""

from __future__ import annotations

import json
from typing import Literal

import torch

from acc.checkpoint import Checkpoint
from acc.ir import Dim, ModelIR
from acc.passes import least_squares as ls
from acc.passes.moments import Moments
from acc.passes.structure import Consumer, consumers, gains
from acc.passes_api import Context, Pass, PassResult

Method = Literal["obs", "actnorm", "absmean"]


class Order(Pass):
    """Importance orders from the second moments of `calibrate`.

    Options:
        method: `obs`: least loss after a refit, removed step by step (ZipLM); `actnorm`: mean square activation times
            column norm; `absmean`: mean absolute activation (Minitron, arXiv 2407.14679), the baseline.
        step: columns that `obs` removes at a time.
        shrink: share by which `obs` shrinks the correlations of inputs, which few tokens overstate; 1 is `actnorm`.
    """

    name = "order"
    kind = "analysis"
    needs = ("parent", "moments")
    gives = ("orders",)
    reads = ()

    method: Method = "obs"
    step: int = 16
    shrink: float = 0.3

    def run(self, ir: ModelIR, ctx: Context) -> PassResult:
        moments = Moments.read(ctx.path(ir.artifacts["moments"]))
        weights = Checkpoint.at(ctx.path(ir.artifacts["parent"]))
        dims = [dim for role in ("ffn", "kv_group", "q_per_kv") for dim in ir.select(role, free=True)]
        orders: dict[str, list[int]] = {}
        for number, dim in enumerate(dims):
            ctx.progress(number, len(dims), dim.name)
            orders[dim.name] = self.of_dim(ir, dim, moments, weights)
        for dim in ir.select("hidden", free=True):
            orders[dim.name] = self.of_hidden(ir, moments)
        ctx.progress(len(dims), len(dims))
        (ctx.scratch / "orders").mkdir(parents=True, exist_ok=True)
        (ctx.scratch / "orders" / "orders.json").write_text(json.dumps(orders), "utf-8")
        facts = {"method": self.method, "dims": len(orders), "tokens": moments.tokens}
        return PassResult(ir.with_artifacts(orders=ctx.artifact("orders")), facts)

    def of_dim(self, ir: ModelIR, dim: Dim, moments: Moments, weights: Checkpoint) -> list[int]:
        """The order of a per-layer dim, from the matrices that consume it; scores of several are added."""
        found = consumers(ir, dim.name)
        if self.method == "obs" and len(found) == 1:
            one = found[0]
            weight = weights.read(one.tensor.name).float()
            inputs = ls.shrunk(moments[f"full/{one.tensor.name}"], self.shrink)
            return ls.obs_order(weight, inputs, one.columns, self.step)
        scores = sum((self.scores(one, moments, weights) for one in found), torch.zeros(dim.size))
        return by_score(scores)

    def scores(self, one: Consumer, moments: Moments, weights: Checkpoint) -> torch.Tensor:
        """The score of each index of the dim in one consumer."""
        if self.method == "absmean":
            absmean = moments[f"absmean/{one.tensor.name}"]
            return torch.stack([absmean[list(block)].mean() for block in one.columns])
        weight = weights.read(one.tensor.name).float()
        return ls.contribution(weight, moments[f"full/{one.tensor.name}"], one.columns)

    def of_hidden(self, ir: ModelIR, moments: Moments) -> list[int]:
        """One order for the whole residual stream: the outputs of the norms inside the layers, their sizes summed."""
        kind = "norm_absmean" if self.method == "absmean" else "norm_output"
        inside = [tensor.name for tensor in gains(ir) if tensor.presence]
        scores = torch.stack([moments[f"{kind}/{name}"] for name in inside])
        return by_score((scores if self.method == "absmean" else scores.sqrt()).sum(0))


def by_score(scores: torch.Tensor) -> list[int]:
    """Indices by falling score; equal scores keep their place."""
    return torch.argsort(scores, descending=True, stable=True).tolist()
