"""The invariants of a ModelIR, checked before and after every pass."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import get_args

from acc.diag import AccError, Diagnostic, nearest
from acc.ir import PRESENCE_ROLES, Axis, Dim, ModelIR, Role, State, Tensor, dims_of


def verify(ir: ModelIR) -> list[Diagnostic]:
    """Everything that is wrong with an IR, in words; empty if nothing is.

    Later checks read what earlier ones have made sure of, so only the findings of the first check that has any are
    returned.
    """
    for check in (_dims, _names, _references, _shapes, _sizes, _kept, _something_left):
        found = list(check(ir))
        if found:
            return found
    return []


def check(ir: ModelIR) -> None:
    """Raise AccError if anything is wrong with an IR."""
    found = verify(ir)
    if found:
        raise AccError(*found)


def _dims(ir: ModelIR) -> Iterator[Diagnostic]:
    for key, dim in ir.dims.items():
        if key != dim.name:
            yield Diagnostic("ACC210", f"dim {key}", f"is called `{dim.name}` inside")
        if dim.role not in get_args(Role) or dim.state not in get_args(State):
            yield Diagnostic("ACC210", f"dim {key}", f"has the unknown role or state `{dim.role}`, `{dim.state}`")
        if dim.size < (0 if dim.state == "const" else 1) or (dim.role in PRESENCE_ROLES and dim.size > 1):
            yield Diagnostic("ACC210", f"dim {key}", f"cannot have the size {dim.size}")
        if dim.state == "pinned" and not dim.why:
            yield Diagnostic("ACC210", f"dim {key}", "is pinned without a reason")


def _names(ir: ModelIR) -> Iterator[Diagnostic]:
    for key, tensor in ir.tensors.items():
        if key != tensor.name:
            yield Diagnostic("ACC210", f"tensor {key}", f"is called `{tensor.name}` inside")
    uses = Counter(name for tensor in ir.tensors.values() for name in (tensor.name, *tensor.aliases))
    uses.update(op.name for op in ir.ops)
    for name, times in uses.items():
        if times > 1:
            yield Diagnostic("ACC210", name, f"{times} tensors, aliases or ops have this name")


def _references(ir: ModelIR) -> Iterator[Diagnostic]:
    for tensor in ir.tensors.values():
        used = dims_of(tensor.axes) | set(tensor.presence) | ({tensor.rescale.dim} if tensor.rescale else set())
        for name in sorted(used - ir.dims.keys()):
            yield _unknown(ir, f"tensor {tensor.name}", name)
        for name in sorted(used & ir.dims.keys()):
            scope = ir.dims[name].scope
            if scope and not tensor.name.startswith(scope + "."):
                yield Diagnostic("ACC211", f"tensor {tensor.name}", f"uses dim `{name}`, which belongs to {scope}")
        for name in tensor.presence:
            if name in ir.dims and ir.dims[name].role not in PRESENCE_ROLES:
                yield Diagnostic("ACC211", f"tensor {tensor.name}", f"cannot depend on `{name}`: not a presence dim")
    for name in sorted({*ir.arch.sizes, *ir.arch.keep} - ir.dims.keys()):
        yield _unknown(ir, "arch", name)


def _unknown(ir: ModelIR, where: str, name: str) -> Diagnostic:
    return Diagnostic("ACC211", where, f"there is no dim `{name}`", nearest(name, ir.dims))


def _shapes(ir: ModelIR) -> Iterator[Diagnostic]:
    """The axes of every matrix and table against the shapes of the ops that read it."""
    shapes = {op.name: op.shape for op in ir.ops}
    for op in ir.ops:
        if op.target == "aten.linear.default" and len(op.inputs) > 1:
            x, weight = op.inputs[:2]
            yield from _axis(ir, weight, 0, op.shape[-1], op.name)
            if x in shapes:
                yield from _axis(ir, weight, 1, shapes[x][-1], x)
        elif op.target == "aten.embedding.default":
            yield from _axis(ir, op.inputs[0], 1, op.shape[-1], op.name)


def _axis(ir: ModelIR, name: str, place: int, size: int, op: str) -> Iterator[Diagnostic]:
    tensor = ir.tensors.get(name)
    if tensor is None:
        return
    made = _traced_size(ir, tensor.axes[place]) if place < len(tensor.axes) else 0
    if made != size:
        where = f"tensor {name}"
        yield Diagnostic("ACC212", where, f"axis {place} makes {made} elements, the traced op `{op}` has {size}")


def _traced_size(ir: ModelIR, axis: Axis) -> int:
    return sum(math.prod(ir.dims[name].size for name in segment) for segment in axis)


# The Arch ------------------------------------------------------------------------------------------------------------


def _sizes(ir: ModelIR) -> Iterator[Diagnostic]:
    used = _present_dims(ir)
    for name, size in ir.arch.sizes.items():
        dim = ir.dims[name]
        where = f"dim {name}"
        if not isinstance(size, int) or not 0 <= size <= dim.size:
            yield Diagnostic("ACC213", where, f"cannot have the size {size}: the traced model has {dim.size}")
        elif dim.state != "free" and size != dim.size:
            yield Diagnostic("ACC214", where, f"is {dim.state} and must stay {dim.size}, not {size}", _why(dim))
        elif size == 0 and dim.role not in PRESENCE_ROLES and name in used:
            yield Diagnostic("ACC213", where, "has the size 0 in tensors that are present", _drop_instead(dim))


def _why(dim: Dim) -> str:
    return f"pinned by {dim.why}" if dim.why else ""


def _drop_instead(dim: Dim) -> str:
    block = {"ffn": "mlp", "kv_group": "attn", "q_per_kv": "attn"}.get(dim.role)
    return f"to drop the sub-block, set `{block}.{dim.layer}` to 0" if block else ""


def _present_dims(ir: ModelIR) -> set[str]:
    present: Sequence[Tensor] = [tensor for tensor in ir.tensors.values() if ir.present(tensor)]
    return {name for tensor in present for name in dims_of(tensor.axes)}


def _kept(ir: ModelIR) -> Iterator[Diagnostic]:
    for name, kept in ir.arch.keep.items():
        dim, size, where = ir.dims[name], ir.size(name), f"dim {name}"
        if len(kept) != size:
            yield Diagnostic("ACC215", where, f"{len(kept)} indices are kept, its size is {size}")
        elif any(a >= b for a, b in itertools.pairwise(kept)):
            yield Diagnostic("ACC215", where, "the kept indices are not in strictly ascending order")
        elif kept and not 0 <= kept[0] <= kept[-1] < dim.size:
            wrong = kept[0] if kept[0] < 0 else kept[-1]
            yield Diagnostic("ACC215", where, f"index {wrong} is kept, the traced model has 0 to {dim.size - 1}")


def _something_left(ir: ModelIR) -> Iterator[Diagnostic]:
    blocks = [dim for role in PRESENCE_ROLES if role != "layer" for dim in ir.select(role)]
    if blocks and not any(ir.size(dim.name) and ir.size(f"layer.{dim.layer}") for dim in blocks):
        yield Diagnostic("ACC216", "arch", "no sub-block of any layer is left", "keep at least one")
