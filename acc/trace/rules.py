"""How each op ties the axes of what it reads to the axes of what it returns.

A rule gets the call with every traced value in the place of its node, and returns the axes of the result. An op
without a rule pins every dim that it touches.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from acc.trace.axes import ONE, Axis, new, pin, product, regroup, size, solved, take, unify
from acc.trace.calls import Call, Result, Value, rule, without_rule


def _aten(*names: str) -> list[str]:
    return [f"aten.{name}" for name in names]


# Elementwise ---------------------------------------------------------------------------------------------------------


@rule(
    *_aten("to.dtype", "to.device", "to.dtype_layout", "to.other", "_to_copy.default", "type_as.default"),
    *_aten("alias.default", "clone.default", "contiguous.default", "detach.default", "dropout.default"),
    *_aten("silu.default", "gelu.default", "relu.default", "relu2.default", "tanh.default", "sigmoid.default"),
    *_aten("rsqrt.default", "sqrt.default", "reciprocal.default", "neg.default", "abs.default", "square.default"),
    *_aten("exp.default", "log.default", "cos.default", "sin.default", "clamp.default", "clamp_min.default"),
    *_aten("pow.Tensor_Scalar", "add.Scalar", "sub.Scalar", "mul.Scalar", "div.Scalar", "softplus.default"),
)
def pointwise(call: Call) -> Result:
    """Each element on its own: the axes stay."""
    return Value(call.args[0].axes)


@rule(
    *_aten("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "pow.Tensor_Tensor", "where.self"),
    *_aten("maximum.default", "minimum.default", "rsub.Tensor"),
)
def broadcast(call: Call) -> Result:
    """Elements pair up from the last dimension on: axes of the same size are the same."""
    return Value(_broadcast([value.axes for value in call.values()], call.why("pairs it with joined parts")))


def _broadcast(operands: Sequence[tuple[Axis, ...]], why: str) -> tuple[Axis, ...]:
    found: list[Axis] = []
    for group in itertools.zip_longest(*(reversed(axes) for axes in operands), fillvalue=ONE):
        wide = [axis for axis in group if size(axis) != 1]
        for other in wide[1:]:
            unify(wide[0], other, why)
        found.append(wide[0] if wide else ONE)
    return tuple(reversed(found))


# Matrices, tables, attention -----------------------------------------------------------------------------------------


@rule("aten.embedding.default")
def embedding(call: Call) -> Result:
    """Rows of a table, one per index."""
    table, indices = call.args[:2]
    return Value((*indices.axes, table.axes[1]))


@rule("aten.linear.default")
def linear(call: Call) -> Result:
    """x Wᵀ + b: the columns are consumed, the rows returned."""
    x, weight = call.value(0), call.value(1)
    unify(x.axes[-1], weight.axes[1], call.why())
    bias = call.arg(2, "bias")
    if bias is not None:
        unify(bias.axes[0], weight.axes[0], call.why())
    return x.replace(-1, weight.axes[0])


@rule("aten.addmm.default")
def addmm(call: Call) -> Result:
    """b + x W, as in layers that store their matrix transposed."""
    bias, x, weight = call.value(0), call.value(1), call.value(2)
    unify(x.axes[-1], weight.axes[0], call.why())
    unify(bias.axes[-1], weight.axes[1], call.why())
    return x.replace(-1, weight.axes[1])


@rule(*_aten("matmul.default", "mm.default", "bmm.default"))
def matmul(call: Call) -> Result:
    """x y, batched."""
    x, y = call.value(0), call.value(1)
    if min(len(x.axes), len(y.axes)) < 2:
        return without_rule(call)
    unify(x.axes[-1], y.axes[-2], call.why())
    return Value((*_broadcast([x.axes[:-2], y.axes[:-2]], call.why()), x.axes[-2], y.axes[-1]))


@rule("aten.scaled_dot_product_attention.default")
def attention(call: Call) -> Result:
    """Queries meet keys of their head, or of the head that their group shares."""
    q, k, v = (value.axes for value in call.args[:3])
    unify(k[-3], v[-3], call.why())
    keys: Axis | None = k[-3]
    if size(q[-3]) != size(k[-3]):  # enable_gqa: the op itself repeats the keys
        keys = product(k[-3], new(size(q[-3]) // size(k[-3]), repeat=True))
    if keys is None:
        return without_rule(call)
    unify(q[-3], keys, call.why())
    unify(q[-1], k[-1], call.why())
    one_size = call.why("one head size serves every layer")
    pin(q[-1], one_size)
    pin(v[-1], one_size)
    mask = call.arg(3, "attn_mask")
    if mask is not None and len(mask.axes) > 2 and size(mask.axes[-3]) != 1:
        unify(mask.axes[-3], q[-3], call.why())
    return Value((*q[:-1], v[-1]))


@rule(*_aten("layer_norm.default", "rms_norm.default"))
def norm(call: Call) -> Result:
    """Statistics over the last dimensions, then a gain (and a bias) per element."""
    x, over = call.value(0), len(call.args[1])
    for parameter in list(call.values())[1:]:
        for mine, its in zip(x.axes[-over:], parameter.axes, strict=True):
            unify(mine, its, call.why())
    return Value(x.axes)


@rule(*_aten("softmax.int", "_softmax.default", "log_softmax.int"))
def softmax(call: Call) -> Result:
    """Every element of the dimension weighs in each of the others, so none can go."""
    pin(call.args[0].axes[call.args[1]], call.why("normalises over it"))
    return Value(call.args[0].axes)


@rule(*_aten("mean.dim", "sum.dim_IntList", "amax.default", "var.correction"))
def reduce(call: Call) -> Result:
    """Statistics over some dimensions: of a cut model, over what is kept."""
    x = call.value(0)
    over = call.arg(1, "dim")
    gone = {place % len(x.axes) for place in ([over] if isinstance(over, int) else over or range(len(x.axes)))}
    keep = call.kwargs.get("keepdim", call.args[2] if len(call.args) > 2 else False)
    axes = ((ONE if keep else None) if place in gone else axis for place, axis in enumerate(x.axes))
    return Value(tuple(axis for axis in axes if axis is not None))


# Shape ---------------------------------------------------------------------------------------------------------------


@rule(*_aten("view.default", "reshape.default", "_unsafe_view.default", "flatten.using_ints", "unflatten.int"))
def view(call: Call) -> Result:
    """The same elements in the same order, grouped to another shape."""
    return Value(tuple(regroup(call.args[0].axes, call.shapes[0], call.why("splits it unevenly"))))


@rule("aten.transpose.int")
def transpose(call: Call) -> Result:
    """Two dimensions swapped."""
    axes = list(call.args[0].axes)
    i, j = call.args[1:3]
    axes[i], axes[j] = axes[j], axes[i]
    return Value(tuple(axes))


@rule(*_aten("t.default"))
def transpose_matrix(call: Call) -> Result:
    """A matrix transposed."""
    return Value(tuple(reversed(call.args[0].axes)))


@rule("aten.permute.default")
def permute(call: Call) -> Result:
    """Dimensions in another order."""
    return Value(tuple(call.args[0].axes[place] for place in call.args[1]))


@rule("aten.unsqueeze.default")
def unsqueeze(call: Call) -> Result:
    """A new dimension of size 1."""
    axes = list(call.args[0].axes)
    axes.insert(call.args[1] % (len(axes) + 1), ONE)
    return Value(tuple(axes))


@rule("aten.squeeze.dim")
def squeeze(call: Call) -> Result:
    """A dimension of size 1 gone."""
    x = call.value(0)
    return x.replace(call.args[1]) if len(call.shapes[0]) < len(x.axes) else x


@rule("aten.select.int")
def select(call: Call) -> Result:
    """One index of a dimension, which therefore has to stay."""
    x, place = call.value(0), call.args[1]
    pin(x.axes[place], call.why("picks one index of it"))
    return x.replace(place)


@rule("aten.expand.default")
def expand(call: Call) -> Result:
    """Dimensions of size 1 repeated."""
    shape = call.shapes[0]
    axes = (*[ONE] * (len(shape) - len(call.args[0].axes)), *call.args[0].axes)
    return Value(tuple(axis if size(axis) == n else new(n, repeat=True) for axis, n in zip(axes, shape, strict=True)))


@rule("aten.repeat_interleave.self_int")
def repeat_interleave(call: Call) -> Result:
    """Every index of a dimension repeated in place."""
    x, times, place = call.value(0), call.args[1], call.arg(2, "dim")
    repeated = None if place is None else product(x.axes[place], new(times, repeat=True))
    return without_rule(call) if repeated is None else x.replace(place, repeated)


@rule("aten.slice.Tensor")
def slices(call: Call) -> Result:
    """A range of a dimension."""
    x, place = call.value(0), call.arg(1, "dim", 0)
    length = size(x.axes[place])
    start, stop, step = slice(call.arg(2, "start"), call.arg(3, "end"), call.arg(4, "step", 1)).indices(length)
    if step != 1:
        pin(x.axes[place], call.why("takes every other element"))
        return x.replace(place, new(len(range(start, stop, step)), pinned=call.why("takes every other element")))
    kept = take(x.axes[place], start, stop, call.why("slices it"))
    return x.replace(place, kept)


@rule(*_aten("chunk.default", "split.Tensor", "split_with_sizes.default"))
def chunks(call: Call) -> Result:
    """A dimension cut into consecutive parts."""
    x, place = call.value(0), call.arg(2, "dim", 0)
    parts, start = [], 0
    for shape in call.shapes:
        stop = start + shape[place]
        parts.append(x.replace(place, take(x.axes[place], start, stop, call.why("slices it"))))
        start = stop
    return parts


@rule("aten.cat.default")
def cat(call: Call) -> Result:
    """Values one after the other along one dimension; they agree in all others."""
    values: list[Value] = call.args[0]
    place = call.arg(1, "dim", 0) % len(values[0].axes)
    _agree(values, call.why(), but=place)
    joined = tuple(segment for value in values for segment in solved(value.axes[place]))
    if any(not segment for segment in joined) and len(joined) > 1:  # a lone index beside others has no name
        pin(joined, call.why("joins single elements"))
        joined = new(size(joined), pinned=call.why("joins single elements"))
    return values[0].replace(place, joined)


@rule("aten.stack.default")
def stack(call: Call) -> Result:
    """Values side by side along a new dimension."""
    values: list[Value] = call.args[0]
    _agree(values, call.why())
    axes = list(values[0].axes)
    axes.insert(call.arg(1, "dim", 0) % (len(axes) + 1), new(len(values), pinned=call.why("counts its operands")))
    return Value(tuple(axes))


def _agree(values: Sequence[Value], why: str, *, but: int | None = None) -> None:
    """The axes of all values are the same, in every dimension but one."""
    for other in values[1:]:
        for dimension, (mine, its) in enumerate(zip(values[0].axes, other.axes, strict=True)):
            if dimension != but:
                unify(mine, its, why)


@rule("getitem")
def getitem(call: Call) -> Result:
    """One element of a returned tuple."""
    found: Value = call.args[0][call.args[1]]
    return found
