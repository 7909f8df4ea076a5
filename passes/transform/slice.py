"""`slice`: the parent's tensors cut to the Arch, streamed from and to disk."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from acc.checkpoint import Checkpoint
from acc.ir import Arch, ModelIR, present_tensors
from acc.passes.moments import Moments
from acc.passes.norms import gain_factors, gain_offset, scaled_gain
from acc.passes_api import Context, Pass, PassResult


class Slice(Pass):
    """Cut every tensor to the sizes of the Arch; which indices stay is read off the orders.

    A norm over fewer coordinates has another mean square: its gain is rescaled by what the moments say (Minitron).
    """

    name = "slice"
    kind = "transform"
    needs = ("parent", "orders", "moments")
    gives = ("weights",)
    reads = ()

    def run(self, ir: ModelIR, ctx: Context) -> PassResult:
        from acc import checkpoint, model

        parent = ctx.path(ir.artifacts["parent"])
        chosen = with_kept(ir, read_orders(ctx.path(ir.artifacts["orders"])))
        moments = Moments.read(ctx.path(ir.artifacts["moments"]))
        tensors = cut_tensors(chosen, Checkpoint.at(parent), moments, ctx)
        checkpoint.write(ctx.scratch / "weights", model.config_for(chosen), tensors, like=parent)
        facts = {"parameters": chosen.parameters(), "parent_parameters": ir.with_arch(Arch()).parameters()}
        return PassResult(chosen.with_artifacts(weights=ctx.artifact("weights")), facts)


def read_orders(folder: Path) -> dict[str, list[int]]:
    """The orders artifact: indices by dim, most important first."""
    orders: dict[str, list[int]] = json.loads((folder / "orders.json").read_text("utf-8"))
    return orders


def with_kept(ir: ModelIR, orders: Mapping[str, Sequence[int]]) -> ModelIR:
    """The model with the kept indices of every cut dim that has an order: its most important ones, ascending."""
    keep = {
        name: tuple(sorted(orders[name][:size]))
        for name, size in ir.arch.sizes.items()
        if name in orders and 0 < size < ir.dims[name].size
    }
    return ir.with_arch(Arch(ir.arch.sizes, {**keep, **ir.arch.keep}))


def cut_tensors(ir: ModelIR, parent: Checkpoint, moments: Moments, ctx: Context) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the cut model under their written names, one at a time."""
    from acc.slicing import cut, written_name

    factors = gain_factors(ir, moments)
    tensors = list(present_tensors(ir))
    for number, tensor in enumerate(tensors):
        ctx.progress(number, len(tensors), tensor.name)
        value = cut(ir, tensor, parent.read(tensor.name))
        if tensor.name in factors:
            value = scaled_gain(value, factors[tensor.name], gain_offset(ir, tensor))
        yield written_name(ir, tensor), value
    ctx.progress(len(tensors), len(tensors))
