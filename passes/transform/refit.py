"""`refit`: the matrices that consume what was cut, refitted by sequential least squares on the calibration text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from acc.checkpoint import Checkpoint
from acc.ir import Arch, ModelIR, present_tensors
from acc.passes.masked import Masked
from acc.passes.moments import Moments
from acc.passes.sequential import Outcome, Sequential
from acc.passes.streaming import batches
from acc.passes_api import Context, Pass, PassResult

FEW = 4
"""Tokens per column under which a refit is told to have too few."""


class Refit(Pass):
    """Closed-form least squares, layer by layer, with inputs from the cut prefix (`acc.passes.sequential`).

    A matrix keeps its plain cut where that is better on other tokens than any refit.

    Options:
        tokens: for the fit; a quarter as many others choose the ridge.
        length: tokens per sample.
        gamma: share of the error accumulated in the layers before that the targets make up for.
        data: text, JSONL or Parquet files; the corpus inside the package if empty.
        batch: samples that run together.
    """

    name = "refit"
    kind = "transform"
    needs = ("parent", "moments", "weights")
    gives = ("weights",)
    reads = ()

    tokens: int = 16384
    length: int = 512
    gamma: float = 0.5
    data: tuple[str, ...] = ()
    batch: int = 4

    def run(self, ir: ModelIR, ctx: Context) -> PassResult:
        from acc import checkpoint, corpus, model

        parent, weights = ctx.path(ir.artifacts["parent"]), ctx.path(ir.artifacts["weights"])
        tokenizer, sources = Checkpoint.at(parent).tokenizer(), [Path(path) for path in self.data]
        count = max(4, self.tokens // self.length)
        fit = corpus.samples(tokenizer, count=count, length=self.length, sources=sources, seed=ctx.seed)
        check = corpus.samples(
            tokenizer, count=count // 4, length=self.length, sources=sources, seed=ctx.seed, part="scoring"
        )
        masked = Masked(ir.with_arch(Arch()), model.load(parent, dtype=torch.float32))
        moments = Moments.read(ctx.path(ir.artifacts["moments"]))
        outcome = refitted(ir, masked, moments, fit, check, ctx, gamma=self.gamma, batch=self.batch)
        tensors = written(ir, Checkpoint.at(weights), outcome.values)
        checkpoint.write(ctx.scratch / "weights", model.config_for(ir), tensors, like=weights)
        facts = told(ir, outcome, fit.numel()) | {"check_tokens": check.numel()}
        return PassResult(ir.with_artifacts(weights=ctx.artifact("weights")), facts)


def refitted(
    ir: ModelIR,
    masked: Masked,
    moments: Moments,
    fit: torch.Tensor,
    check: torch.Tensor,
    ctx: Context,
    *,
    gamma: float,
    batch: int,
) -> Outcome:
    """The sequential refit of the Arch of `ir` on samples [count, length]."""
    plain = masked.cut(ir, moments)
    return Sequential(masked, ir, plain, batches(fit, batch), batches(check, batch), gamma).run(ctx.progress)


def written(
    ir: ModelIR, weights: Checkpoint, refitted: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the cut model under their written names, the refitted ones in place of the plain cuts."""
    from acc.slicing import written_name

    for tensor in present_tensors(ir):
        name = written_name(ir, tensor)
        value = weights.read(name)
        if tensor.name in refitted:
            rows, columns = (torch.tensor(ir.axis_indices(axis)) for axis in tensor.axes)
            value = refitted[tensor.name][rows][:, columns].to(value.dtype)
        yield name, value


def told(ir: ModelIR, outcome: Outcome, tokens: int) -> dict[str, object]:
    """Facts: which ridge how many matrices were refitted with, which kept the plain cut, whether tokens are short."""
    plain = [name for name, ridge in outcome.ridges.items() if ridge is None]
    ridges = Counter(f"{ridge:g}" for ridge in outcome.ridges.values() if ridge is not None)
    columns = max((ir.axis_size(ir.tensors[name].axes[1]) for name in outcome.ridges), default=0)
    facts: dict[str, object] = {
        "tokens": tokens,
        "most_columns": columns,
        "matrices": len(outcome.ridges),
        "matrices_by_ridge": dict(ridges),
        "kept_plain": plain,
    }
    if tokens < FEW * columns:
        message = f"{tokens} tokens are few for matrices of {columns} columns; the refit stays near the plain cut"
        hint = f"give refit{{tokens={FEW * columns}}} or more"
        facts["notes"] = [{"code": "ACC435", "where": "refit", "message": message, "hint": hint, "level": "warning"}]
    return facts
