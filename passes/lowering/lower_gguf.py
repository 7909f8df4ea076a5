"""The current Arch as a GGUF file in F16: the most exact form that the engine loads; verification starts from it."""

from __future__ import annotations

import re
from typing import Any

from acc.backend_api import Backend, LoweringPlan
from acc.diag import AccError
from acc.ir import Arch, ModelIR
from acc.passes_api import Context, Pass, PassResult


class LowerGGUF(Pass):
    """Write an F16 file in the host architecture that holds the shapes.

    Options:
        allow_fallback: write tensors in another type where a cut made theirs unfit, instead of refusing.
    """

    name = "lower-gguf"
    kind = "lowering"
    needs = ("weights",)
    gives = ("gguf_f16",)
    reads = ("engine",)
    allow_fallback: bool = False

    def run(self, ir: ModelIR, ctx: Context) -> PassResult:
        """Write the file; facts as `plan_facts` tells."""
        plan = lower(ir, ctx, "f16", "model-f16.gguf", self.allow_fallback)
        return PassResult(ir.with_artifacts(gguf_f16=ctx.artifact("model-f16.gguf")), plan_facts(plan, "f16"))


def lower(ir: ModelIR, ctx: Context, quant: str, name: str, allow_fallback: bool) -> LoweringPlan:
    """Write one GGUF file into the pass's folder.

    Raises:
        AccError: ACC350 without an engine to lower for; ACC351 if tensors would silently become another type.
    """
    backend = ctx.backend
    if backend is None:
        raise AccError.of("ACC350", quant, "there is no engine to lower for", "name a target: `--target cpu-llamacpp`")
    if not allow_fallback:
        _refuse_new_fallbacks(ir, backend, quant)
    moments = ir.artifacts.get("moments")
    out = ctx.scratch / name
    weights = ctx.path(ir.artifacts["weights"])
    return backend.lower(ir, weights, quant, out, ctx, ctx.path(moments) if moments and quant != "f16" else None)


def _refuse_new_fallbacks(ir: ModelIR, backend: Backend, quant: str) -> None:
    """Refuse tensors that the cut made unfit for their type; what falls back in the parent too is only reported."""
    plan = backend.plan(ir, quant)
    if not plan.fallbacks:
        return
    forced = {_role(tensor.name) for tensor in backend.plan(ir.with_arch(Arch()), quant).fallbacks}
    made = [tensor for tensor in plan.fallbacks if _role(tensor.name) not in forced]
    if made:
        one = made[0]
        told = (
            f"{len(made)} tensors would silently become another type, such as {one.name}: {one.type}, not {one.wanted}"
        )
        hint = f"its rows have {one.shape[-1]} columns: search on the grid that `acc check` shows, or --allow-fallback"
        raise AccError.of("ACC351", quant, told, hint)


def _role(name: str) -> str:
    """What a tensor is in its layer, or in the model: its name without the layer's number."""
    return re.sub(r"\.\d+\.", ".", name)


def plan_facts(plan: LoweringPlan, quant: str) -> dict[str, Any]:
    """What was written: host, format, bytes, bits per weight, tensors by type, fallbacks, and every note."""
    by_type: dict[str, int] = {}
    for tensor in plan.tensors:
        by_type[tensor.type] = by_type.get(tensor.type, 0) + 1
    return {
        "host": plan.host,
        "quant": quant,
        "file_bytes": plan.file_bytes,
        "bits_per_weight": plan.bits_per_weight,
        "tensors_by_type": by_type,
        "fallbacks": [{"name": t.name, "wanted": t.wanted, "type": t.type} for t in plan.fallbacks],
        "notes": [
            {"code": n.code, "where": n.where, "message": n.message, "hint": n.hint, "level": n.level}
            for n in plan.notes
        ],
    }
