"""`refit`: least squares on the kept columns of the projections that consume a cut dim."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from acc.checkpoint import Checkpoint
from acc.ir import ModelIR, Tensor, present_tensors
from acc.passes import least_squares as ls
from acc.passes.moments import Moments
from acc.passes.structure import consumers
from acc.passes_api import Context, Pass, PassResult


class Refit(Pass):
    """Closed form, one shot: W H[:, K] (H[K, K] + ridge)⁻¹."""

    name = "refit"
    kind = "transform"
    needs = ("parent", "moments", "weights")
    gives = ("weights",)
    reads = ()

    ridge: float = 0.05

    def run(self, ir: ModelIR, ctx: Context) -> PassResult:
        from acc import checkpoint, model
        from acc.slicing import written_name

        moments = Moments.read(ctx.path(ir.artifacts["moments"]))
        parent, weights = ctx.path(ir.artifacts["parent"]), ctx.path(ir.artifacts["weights"])
        dims = [*ir.select("ffn"), *ir.select("kv_group")]
        consuming = {one.tensor.name for dim in dims for one in consumers(ir, dim.name)}

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            found = list(present_tensors(ir))
            for number, tensor in enumerate(found):
                ctx.progress(number, len(found), tensor.name)
                name = written_name(ir, tensor)
                value = Checkpoint.at(weights).read(name)
                if tensor.name in consuming and ir.axis_size(tensor.axes[1]) < len(moments[f"full/{tensor.name}"]):
                    value = self.refitted(ir, tensor, Checkpoint.at(parent).read(tensor.name), moments).to(value.dtype)
                yield name, value

        checkpoint.write(ctx.scratch / "weights", model.config_for(ir), tensors(), like=weights)
        return PassResult(ir.with_artifacts(weights=ctx.artifact("weights")), {"tokens": moments.tokens})

    def refitted(self, ir: ModelIR, tensor: Tensor, value: torch.Tensor, moments: Moments) -> torch.Tensor:
        rows, columns = (ir.axis_indices(axis) for axis in tensor.axes)
        return ls.refit(value.float(), moments[f"full/{tensor.name}"], columns, self.ridge)[rows]
