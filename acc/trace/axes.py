"""The algebra of axes while a graph is traced: what is known of each axis, and how two of them are made to agree.

An axis is a concatenation of segments, and a segment an ordered product of `Var`s, major to minor. A Var is a size
of which nothing more is known yet; it is later *bound* to another Var (they are the same dim), to a product (it is
made of several dims) or to a concatenation (it is sliced into parts). What cannot be expressed is pinned: a pinned
Var keeps its size for ever, which is always right, while an invented dim gives a wrong model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Segment = tuple["Var", ...]
Axis = tuple[Segment, ...]

ONE: Axis = ((),)
"""An axis of size 1: one segment, the empty product."""


@dataclass(eq=False)
class Var:
    """One unknown of the solver.

    Attributes:
        size: elements.
        pinned: why it may never be cut, or "".
        repeat: it counts copies that the graph makes (the queries that share one key head), not stored values.
        minor: it stands behind another factor in some product, so that it cannot be cut into a concatenation.
        bound: what it has turned out to be.
    """

    size: int
    pinned: str = ""
    repeat: bool = False
    minor: bool = False
    bound: Axis | None = None

    def bind(self, axis: Axis) -> None:
        """Say what this Var is made of; its properties pass on."""
        for segment in axis:
            for place, var in enumerate(segment):
                var.pinned = var.pinned or self.pinned
                var.repeat = var.repeat or self.repeat
                var.minor = var.minor or self.minor or place > 0
        self.bound = axis


def new(size: int, *, pinned: str = "", repeat: bool = False) -> Axis:
    """An axis of which only the size is known."""
    if size == 0:
        return ()
    return ONE if size == 1 else ((Var(size, pinned, repeat),),)


def solved(axis: Axis) -> Axis:
    """The axis with every bound Var replaced by what it is bound to."""
    return tuple(found for segment in axis for found in _solved_segment(segment))


def _solved_segment(segment: Segment) -> Iterator[Segment]:
    for place, var in enumerate(segment):
        if var.bound is not None:
            head, tail = segment[:place], segment[place + 1 :]
            assert not head or len(var.bound) == 1, "a minor factor is never a concatenation"
            for part in var.bound:  # a major concatenation distributes: (a + b) * c = a * c + b * c
                yield from _solved_segment((*head, *part, *tail))
            return
    yield segment


def size(axis: Axis) -> int:
    """Elements of an axis."""
    return sum(math.prod(var.size for var in segment) for segment in axis)


def variables(axis: Axis) -> Iterator[Var]:
    """The Vars that an axis is made of now."""
    return (var for segment in solved(axis) for var in segment)


def pin(axis: Axis, why: str) -> None:
    """Forbid any cut of an axis; the first reason stays."""
    for var in variables(axis):
        var.pinned = var.pinned or why


def product(*axes: Axis) -> Axis | None:
    """The axes merged into one, major to minor; None if a minor one is a concatenation."""
    major, *minors = (solved(axis) for axis in axes if axis != ONE) if any(a != ONE for a in axes) else (ONE,)
    if any(len(minor) != 1 for minor in minors):
        return None
    tail = tuple(var for minor in minors for var in minor[0])
    merged = tuple((*segment, *tail) for segment in major)
    for segment in merged:
        for var in segment[1:]:
            var.minor = True
    return merged


# Agreement -----------------------------------------------------------------------------------------------------------


def unify(a: Axis, b: Axis, why: str) -> None:
    """Make two axes of the same size one and the same; where that cannot be expressed, pin both.

    Args:
        why: the reason to give for pinning.
    """
    a, b = solved(a), solved(b)
    if a == b:
        return
    pinned = next((var.pinned for axis in (a, b) for var in variables(axis) if var.pinned), "")
    if _ends(a) != _ends(b) and pinned:  # to cut the one like the other would only make more pinned parts
        why = pinned
    elif size(a) == size(b) and _cut_at(a, _ends(b)) and _cut_at(b, _ends(a)):
        for left, right in zip(solved(a), solved(b), strict=True):
            _unify_products(left, right, why)
        return
    pin(a, why)
    pin(b, why)


def _unify_products(a: Segment, b: Segment, why: str) -> None:
    """Walk two products of equal size from the major end, refining the larger factor by the smaller one."""
    while a and b:
        (a,), (b,) = solved((a,)), solved((b,))
        x, y = a[0], b[0]
        if x is y:
            a, b = a[1:], b[1:]
        elif x.size == y.size:
            y.bind(((x,),))
        else:
            small, large = (x, y) if x.size < y.size else (y, x)
            if large.size % small.size:
                pin((a,), why)
                pin((b,), why)
                return
            large.bind(((small, Var(large.size // small.size)),))


def _ends(axis: Axis) -> list[int]:
    """The offsets between the segments of an axis."""
    ends, offset = [], 0
    for segment in axis[:-1]:
        offset += size((segment,))
        ends.append(offset)
    return ends


def _cut_at(axis: Axis, offsets: Sequence[int]) -> bool:
    """Cut an axis into further segments at the offsets; False if one falls where no cut can be expressed."""
    for offset in offsets:
        start = 0
        for segment in solved(axis):
            length = size((segment,))
            if start < offset < start + length and not _cut_segment(segment, offset - start):
                return False
            start += length
    return True


def _cut_segment(segment: Segment, offset: int) -> bool:
    major, rest = segment[0], math.prod(var.size for var in segment[1:])
    if major.minor or major.pinned or offset % rest:
        return False
    at = offset // rest
    parts = (new(at), new(major.size - at))
    if ONE in parts:
        return False  # a part of size 1 has no name; nothing is lost by keeping the axis whole
    major.bind(tuple(segment for part in parts for segment in part))
    return True


# Slices and views ----------------------------------------------------------------------------------------------------


def take(axis: Axis, start: int, stop: int, why: str) -> Axis:
    """The slice [start, stop) of an axis; pins the axis where the slice cannot be expressed."""
    whole = size(axis)
    if (start, stop) == (0, whole):
        return axis
    if stop <= start:
        return ()
    inner = [offset for offset in (start, stop) if 0 < offset < whole]
    if not _cut_at(axis, inner):
        pin(axis, why)
        return new(stop - start, pinned=why)
    offset, found = 0, []
    for segment in solved(axis):
        if start <= offset < stop:
            found.append(segment)
        offset += size((segment,))
    return tuple(found)


def regroup(axes: Sequence[Axis], shape: Sequence[int], why: str) -> list[Axis]:
    """What a view or reshape makes of the axes: the same ordered factors, grouped to another shape."""
    items = [item for axis in axes for item in _items(axis)]
    found: list[Axis] = []
    for wanted in shape:
        axis = _gather(items, wanted)
        if axis is None:
            for one in axes:
                pin(one, why)
            return [new(n, pinned=why) for n in shape]
        found.append(axis)
    return found


def _items(axis: Axis) -> list[Axis]:
    """The factors of an axis, each as an axis; a concatenation is one item."""
    axis = solved(axis)
    return [((var,),) for var in axis[0]] if len(axis) == 1 else [axis]


def _gather(items: list[Axis], wanted: int) -> Axis | None:
    """Take factors from the front of `items` until they make up one axis of the wanted size."""
    group: list[Axis] = []
    while wanted > 1:
        if not items:
            return None
        item = items.pop(0)
        if wanted % size(item) == 0:
            group.append(item)
            wanted //= size(item)
        elif len(item) == 1 and size(item) % wanted == 0:
            high, low = Var(wanted), Var(size(item) // wanted)
            item[0][0].bind(((high, low),))
            group.append(((high,),))
            items.insert(0, ((low,),))
            wanted = 1
        else:
            return None
    return product(*group) if group else ONE
