"""The current Arch as a Hugging Face checkpoint: what every other tool can load, train or convert."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from acc.ir import ModelIR, Tensor, present_tensors
from acc.passes_api import Context, Pass, PassResult

if TYPE_CHECKING:
    import torch

    from acc.checkpoint import Checkpoint


class LowerHF(Pass):
    """Write a Hugging Face folder: standard configuration if all layers are alike, `per_layer_config` if they are not.

    Options:
        dtype: of the weights: `parent` (the configuration's), `float32`, `bfloat16` or `float16`.
    """

    name = "lower-hf"
    kind = "lowering"
    needs = ("weights",)
    gives = ("hf",)
    reads = ()
    dtype: str = "parent"

    def run(self, ir: ModelIR, ctx: Context) -> PassResult:
        """Stream the weights into a folder of their own; facts: parameters, bytes, dtype, whether it is uniform."""
        import torch

        from acc.checkpoint import Checkpoint, write
        from acc.model import config_for

        weights = Checkpoint.at(ctx.path(ir.artifacts["weights"]))
        name = self._dtype(ir)
        config = {**config_for(ir), "dtype": name}
        folder = ctx.scratch / "hf"
        write(folder, config, _tensors(ir, weights, getattr(torch, name), ctx), like=weights.folder)
        facts = {
            "parameters": ir.parameters(),
            "bytes": sum(path.stat().st_size for path in folder.iterdir()),
            "dtype": name,
            "standard": "per_layer_config" not in config,
        }
        return PassResult(ir.with_artifacts(hf=ctx.artifact("hf")), facts)

    def _dtype(self, ir: ModelIR) -> str:
        from acc.diag import AccError, nearest

        known = ("float32", "bfloat16", "float16")
        parent = ir.config.get("dtype") or ir.config.get("torch_dtype") or "float32"
        found = str(parent if self.dtype == "parent" else self.dtype).removeprefix("torch.")
        if found not in known:
            raise AccError.of(
                "ACC312", "lower-hf{dtype}", f"cannot write `{found}`", nearest(found, ("parent", *known))
            )
        return found


def _tensors(ir: ModelIR, weights: Checkpoint, dtype: torch.dtype, ctx: Context) -> Iterator[tuple[str, torch.Tensor]]:
    from acc.slicing import written_name

    present: list[Tensor] = list(present_tensors(ir))
    for index, tensor in enumerate(present):
        name = written_name(ir, tensor)
        ctx.progress(index, len(present), name)
        yield name, weights.read(name).to(dtype)
