"""The final GGUF file, in the target's number format, every tensor's type chosen by acc."""

from __future__ import annotations

from acc.diag import AccError
from acc.ir import ModelIR
from acc.passes.lowering.lower_gguf import lower, plan_facts
from acc.passes_api import Context, Pass, PassResult


class Quantize(Pass):
    """Write the GGUF file to serve, from the checkpoint and not from the F16 file, so that nothing is rounded twice.

    Options:
        type: the number format, such as `q4_k_m`; the target's if empty.
        allow_fallback: write tensors in another type where a cut made theirs unfit, instead of refusing.
    """

    name = "quantize"
    kind = "lowering"
    needs = ("weights",)
    gives = ("gguf",)
    reads = ("engine", "quant")
    type: str = ""
    allow_fallback: bool = False

    def run(self, ir: ModelIR, ctx: Context) -> PassResult:
        """Quantise with the second moments of `calibrate`, if there are any, as importance; facts as `plan_facts`."""
        quant = self.type or (ctx.target.quant if ctx.target else "")
        if not quant:
            raise AccError.of("ACC350", "quantize", "there is no target that names a format", "set quantize{type=q8_0}")
        name = f"model-{quant}.gguf"
        plan = lower(ir, ctx, quant, name, self.allow_fallback)
        facts = {**plan_facts(plan, quant), "importance": "moments" in ir.artifacts}
        return PassResult(ir.with_artifacts(gguf=ctx.artifact(name)), facts)
