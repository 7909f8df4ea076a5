"""A pass in ten lines; `docs/writing-a-pass.md` walks through it."""

from acc.ir import ModelIR
from acc.passes_api import Context, Pass, PassResult


class RoundFFN(Pass):
    """Round every FFN width down to what the engine likes."""

    name = "round-ffn"
    kind = "search"
    reads = ()
    to: int = 256

    def run(self, ir: ModelIR, ctx: Context) -> PassResult:
        widths = {dim.name: ir.size(dim.name) for dim in ir.select("ffn", free=True)}
        new = {name: max(self.to, width // self.to * self.to) for name, width in widths.items()}
        return PassResult(ir.resize(new) if new != widths else ir, {"ffn": new})
