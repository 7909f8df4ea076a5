"""Traced values, calls of ops on them, and the registry of rules: what rules are written with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from acc.trace.axes import Axis, new, pin


@dataclass(frozen=True)
class Value:
    """A traced value: one Axis per dimension."""

    axes: tuple[Axis, ...]

    def replace(self, place: int, *axes: Axis) -> Value:
        """The value with one axis replaced by others, or by none."""
        place %= len(self.axes)
        return Value((*self.axes[:place], *axes, *self.axes[place + 1 :]))


Result = Value | list[Value]


@dataclass(frozen=True)
class Call:
    """One op of the graph.

    Attributes:
        target: such as `aten.linear.default`.
        where: the path of the module that called it.
        args, kwargs: with a Value in the place of every traced node.
        shapes: concrete shapes of the results (one, or one per element of a returned tuple).
    """

    target: str
    where: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shapes: list[tuple[int, ...]]

    def why(self, reason: str = "") -> str:
        """The reason that a pinned dim keeps: the op, the place, and what it does."""
        return f"{self.target} in {self.where or 'the model'}" + (f": {reason}" if reason else "")

    def value(self, place: int) -> Value:
        """The traced value at a place."""
        found: Value = self.args[place]
        return found

    def arg(self, place: int, name: str, default: Any = None) -> Any:
        """An argument by place or by name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    def values(self) -> Iterator[Value]:
        """Every traced value among the arguments."""
        return _values([*self.args, *self.kwargs.values()])


def _values(tree: Any) -> Iterator[Value]:
    if isinstance(tree, Value):
        yield tree
    elif isinstance(tree, list | tuple):
        for one in tree:
            yield from _values(one)


Rule = Callable[[Call], Result]
RULES: dict[str, Rule] = {}


def rule(*targets: str) -> Callable[[Rule], Rule]:
    """Register a function as the rule of some ops."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, function))
        return function

    return register


def apply(call: Call) -> Result:
    """The result of an op, by its rule."""
    return RULES.get(call.target, without_rule)(call)


def without_rule(call: Call) -> Result:
    """Pin everything that an unknown op reads; what it returns is new and pinned too."""
    why = call.why("no rule for this op")
    for value in call.values():
        for axis in value.axes:
            pin(axis, why)
    made = [Value(tuple(new(n, pinned=why) for n in shape)) for shape in call.shapes]
    return made[0] if len(made) == 1 else made
