"""The report's charts as inline SVG. Grey is the parent, blue the child; hollow is predicted, filled is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import get_args

from markupsafe import Markup

from acc.ir import LayerShape, ModelShape
from acc.quantity import written
from acc.report import units
from acc.report.data import Report, Side, Stage
from acc.report.svg import Canvas, ticks
from acc.target import LIMIT_UNITS, LimitName

WIDTH, LEFT, RIGHT = 920.0, 64.0, 10.0
COSTS: tuple[LimitName, ...] = get_args(LimitName)
_GONE = LayerShape(0, 0, 0)


def architecture(parent: ModelShape, child: ModelShape) -> Markup:
    """Per layer: FFN width above, query heads and KV heads below; what the parent had stands behind in grey."""
    canvas = Canvas(WIDTH, 348, "architecture per layer: FFN width and heads of parent and child")
    layers = list(zip_longest(parent.layers, child.layers, fillvalue=_GONE))
    _layer_panel(canvas, 18, 150, "FFN width", layers, lambda layer: layer.ffn)
    _layer_panel(canvas, 202, 100, "heads", layers, lambda layer: layer.heads, lambda layer: layer.kv_heads)
    column = (WIDTH - LEFT - RIGHT) / len(layers)
    every = 1 if column >= 18 else 5
    for index in range(0, len(layers), every):
        canvas.text(LEFT + (index + 0.5) * column, 320, str(index), anchor="middle")
    canvas.text(LEFT + (WIDTH - LEFT - RIGHT) / 2, 342, "layer of the parent", anchor="middle")
    return canvas.markup()


def _layer_panel(
    canvas: Canvas,
    y: float,
    height: float,
    title: str,
    layers: Sequence[tuple[LayerShape, LayerShape]],
    get: Callable[[LayerShape], int],
    inner: Callable[[LayerShape], int] | None = None,
) -> None:
    top = max(1, *(max(get(before), get(after)) for before, after in layers))
    column = (WIDTH - LEFT - RIGHT) / len(layers)
    canvas.text(LEFT, y - 6, title, "title")
    for tick in ticks(top, whole=True):
        level = y + height * (1 - tick / top)
        canvas.line(LEFT, level, WIDTH - RIGHT, level, "grid")
        canvas.text(LEFT - 8, level + 4, f"{tick:,.0f}", anchor="end")
    for index, (before, after) in enumerate(layers):
        x, width = LEFT + (index + 0.1) * column, 0.8 * column
        tip = f"layer {index}: {title} {get(before)} → {get(after)}" + (
            f", KV heads {inner(before)} → {inner(after)}" if inner else ""
        )
        for shape, class_ in ((before, "parent"), (after, "child")):
            tall = height * get(shape) / top
            canvas.rect(x, y + height - tall, width, tall, class_, tip)
        if inner:
            tall = height * inner(after) / top
            canvas.rect(x + width / 4, y + height - tall, width / 2, tall, "inner", tip)
        if get(before) and not get(after):
            canvas.text(x + width / 2, y + height - 5, "✕", "gone", "middle")


def costs(report: Report) -> Markup:
    """Every cost of parent and child as a multiple of the parent's: predicted on the upper line, measured below it."""
    rows = [name for name in COSTS if report.parent.figures(name)]
    bases = {name: list(report.parent.figures(name).values())[-1].value for name in rows}
    sides = ((report.parent, "parent", 14.0), (report.child, "child", 42.0))
    ends = [
        number.value * (1 + number.error) / bases[name]
        for name in rows
        for side, _, _ in sides
        for number in side.figures(name).values()
    ]
    top, row = 1.08 * max([1.0, *ends]), 72.0
    canvas = Canvas(WIDTH, 30 + row * len(rows), "costs as multiples of the parent's")

    def place(multiple: float) -> float:
        return 170 + (WIDTH - 180 - RIGHT) * multiple / top

    for tick in ticks(top, 6):
        canvas.line(place(tick), 4, place(tick), row * len(rows) + 4, "grid")
        canvas.text(place(tick), row * len(rows) + 22, f"{tick:g}x", anchor="middle")
    for index, name in enumerate(rows):
        canvas.text(158, row * index + 38, units.COST_NAMES[name], anchor="end")
        for line in report.limits:
            if line.asked.name == name and line.limit and line.limit.value / bases[name] <= top:
                x = place(line.limit.value / bases[name])
                canvas.line(x, row * index + 8, x, row * index + 60, "limit", f"limit: {units.limit(line.asked)}")
        for side, class_, offset in sides:
            for kind, number in side.figures(name).items():
                y = row * index + offset + (10 if kind == "measured" else 0)
                middle, half = number.value / bases[name], number.value * number.error / bases[name]
                tip = f"{class_}, {number.source}: {units.figure(number)}"
                canvas.line(place(middle - half), y, place(middle + half), y, f"band {class_}", tip)
                canvas.circle(place(middle), y, 4.5, f"{kind} {class_}", tip)
    return canvas.markup()


def rounds(report: Report, name: LimitName) -> Markup | None:
    """Every round of the bench, in the order in which parent and child took turns; None where nothing was measured."""
    sides = [(side, class_) for side, class_ in ((report.parent, "parent"), (report.child, "child")) if side.measured]
    series = [(list(side.measured.rounds.get(name, ())), class_) for side, class_ in sides if side.measured]
    values = [number for rounds_, _ in series for number in rounds_]
    if not values:
        return None
    canvas = Canvas(WIDTH / 2 - 10, 190, f"bench rounds: {units.COST_NAMES[name]}")
    top, height = 1.12 * max(values), 130.0
    unit = LIMIT_UNITS[name]
    title = units.COST_NAMES[name] + (f", {unit}" if unit == "tok/s" else "")
    canvas.text(LEFT, 12, title, "title")
    for tick in ticks(top):
        y = 24 + height * (1 - tick / top)
        canvas.line(LEFT, y, canvas.width - RIGHT, y, "grid")
        canvas.text(LEFT - 8, y + 4, _tick(tick, unit), anchor="end")
    most = max(len(numbers) for numbers, _ in series)
    for numbers, class_ in series:
        median = sorted(numbers)[len(numbers) // 2] if numbers else 0.0
        level = 24 + height * (1 - median / top)
        canvas.line(LEFT, level, canvas.width - RIGHT, level, f"median {class_}", f"{class_}, median")
        for index, number in enumerate(numbers):
            x = LEFT + (canvas.width - LEFT - RIGHT) * (index + 0.5) / most
            tip = f"{class_}, round {index + 1}: {written(number, unit)}"
            canvas.circle(x, 24 + height * (1 - number / top), 4, f"measured {class_}", tip)
    canvas.text(LEFT + (canvas.width - LEFT - RIGHT) / 2, 182, "round", anchor="middle")
    return canvas.markup()


def _tick(value: float, unit: str) -> str:
    """An axis label: short, as the margin is narrow; the unit of a rate is in the title."""
    return f"{value:,.0f}" if unit == "tok/s" or not value else written(value, unit)


def stages(done: Sequence[Stage]) -> Markup:
    """How long each stage took, and its peak memory."""
    canvas = Canvas(WIDTH, 24 * len(done) + 8, "time and peak memory of each stage")
    longest = max([1e-9, *(stage.seconds for stage in done)])
    for index, stage in enumerate(done):
        y = 24.0 * index + 4
        canvas.text(118, y + 14, stage.name, anchor="end")
        canvas.rect(
            126, y + 2, 480 * stage.seconds / longest, 15, "child" if not stage.cached else "parent", stage.spec
        )
        peak = f" · {units.size(stage.peak_memory_bytes)} peak" if stage.peak_memory_bytes else ""
        told = units.duration(stage.seconds) + peak + (" · from the store" if stage.cached else "")
        canvas.text(132 + 480 * stage.seconds / longest, y + 14, told)
    return canvas.markup()


def storage(side: Side) -> Markup:
    """The bytes of an artifact by tensor type, as one bar."""
    canvas = Canvas(WIDTH, 46, f"bytes by tensor type: {side.name}")
    total, x = sum(kind.bytes for kind in side.types.values()) or 1, 0.0
    for index, (name, kind) in enumerate(side.types.items()):
        width = WIDTH * kind.bytes / total
        tip = f"{name}: {kind.tensors} tensors, {units.size(kind.bytes)}"
        canvas.rect(x, 0, width - 1.5, 22, f"type{index % 6}", tip)
        if width > 60:
            canvas.text(x + 2, 38, f"{name} · {units.size(kind.bytes)}")
        x += width
    return canvas.markup()
