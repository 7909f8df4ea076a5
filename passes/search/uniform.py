"""`uniform`: the same share of every layer, as a baseline and for pipelines that know what they want."""

from __future__ import annotations

from acc.diag import AccError
from acc.ir import Dim, ModelIR, Role
from acc.passes_api import Context, Pass, PassResult


class Uniform(Pass):
    """Every free dim of a role cut to one size.

    Options:
        ffn: FFN width; 0 leaves it.
        kv: KV groups per layer; 0 leaves them.
        queries: query heads per KV group; 0 leaves them.
        hidden: width of the residual stream; 0 leaves it.
        ratio: share of the FFN width that is kept where `ffn` is not given.
        step: widths from `ratio` are rounded down to a multiple of it.
    """

    name = "uniform"
    kind = "search"
    reads = ()

    ffn: int = 0
    kv: int = 0
    queries: int = 0
    hidden: int = 0
    ratio: float = 1.0
    step: int = 1

    def run(self, ir: ModelIR, ctx: Context) -> PassResult:
        sizes: dict[str, int] = {}
        wanted: tuple[tuple[Role, int], ...] = (
            ("ffn", self.ffn),
            ("kv_group", self.kv),
            ("q_per_kv", self.queries),
            ("hidden", self.hidden),
        )
        for role, size in wanted:
            if size:
                sizes |= {dim.name: checked(dim, size) for dim in free(ir, role)}
        if self.ratio != 1.0 and not self.ffn:
            sizes |= {dim.name: checked(dim, self.rounded(dim)) for dim in free(ir, "ffn")}
        facts = {"sizes": sizes, "parameters": ir.resize(sizes).parameters()}
        return PassResult(ir.resize(sizes) if sizes else ir, facts)

    def rounded(self, dim: Dim) -> int:
        """The kept share of a dim, a multiple of `step`, at least one step."""
        return max(self.step, int(dim.size * self.ratio) // self.step * self.step)


def free(ir: ModelIR, role: Role) -> list[Dim]:
    """The free dims of a role. Raises AccError ACC430 if there are none."""
    found = ir.select(role, free=True)
    if not found:
        why = next((dim.why for dim in ir.select(role) if dim.why), "the model has no such dim")
        raise AccError.of("ACC430", role, f"cannot be cut: {why}", "`acc inspect MODEL` lists the dims that can")
    return found


def checked(dim: Dim, size: int) -> int:
    """The size, if the dim can take it. Raises AccError ACC431."""
    if not 1 <= size <= dim.size:
        raise AccError.of("ACC431", dim.name, f"cannot be {size}: it has {dim.size}", f"give 1 to {dim.size}")
    return size
