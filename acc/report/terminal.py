"""The report as a terminal summary: what was asked and chosen, what it costs predicted and measured, what fell back."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from acc.cost import Figure
from acc.quantity import written
from acc.report import units
from acc.report.data import Report, Side
from acc.report.rows import fallback_rows, headline, note_rows, short_name
from acc.target import LIMIT_UNITS

_STYLES = {"kept": "bold green", "broken": "bold red", "unknown": "yellow"}
_LEVELS = {"error": "red", "warning": "yellow", "note": "dim"}


def summary(report: Report) -> Group:
    """What fits a screen; `report.html` has the rest."""
    parts: list[RenderableType] = [_head(report), Text(), _costs(report), Text(), _models(report)]
    if report.quality or report.parity:
        parts += [Text(), _quality(report)]
    fallbacks, notes = fallback_rows(report.child.fallbacks), note_rows(report.notes)
    if fallbacks or notes:
        parts.append(Text())
    for wanted, stored, tensors, size in fallbacks:
        what = f"{tensors} tensor{'s' if tensors > 1 else ''} ({written(size, 'B')})"
        parts.append(Text(f"fallback: {what} stored as {stored}, not {wanted}", "yellow"))
    for note, places in notes:
        where = f" ({places[0]}{f' and {len(places) - 1} more' if len(places) > 1 else ''})" if places else ""
        parts.append(Text(f"{note.level}[{note.code}]: {note.message}{where}", _LEVELS[note.level]))
    if report.stages:
        slowest = sorted(report.stages, key=lambda stage: -stage.seconds)[:4]
        told = ", ".join(f"{stage.name} {units.duration(stage.seconds)}" for stage in slowest)
        parts += [Text(), Text(f"{units.duration(report.seconds)} in all: {told}", "dim")]
    parts += [Text(f"run it: {line}") for line in report.run[:1]]
    return Group(*parts)


def _head(report: Report) -> Text:
    target = report.target
    head = Text.assemble((short_name(report.model), "bold"), " for ", (target.name, "bold"), ": ")
    head.append(headline(report), _STYLES[report.verdict] if report.limits else "")
    engine = report.engine
    by = f"{engine.engine} {engine.version} ({engine.origin})" if engine else f"{target.engine}, not on this machine"
    return head.append(f"\n{by}, {target.device.name}, workload {target.workload.name}", "dim")


def _costs(report: Report) -> Table:
    table = Table(title="costs", title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("limit", justify="right")
    for side in ("parent", "child"):
        for kind in ("predicted", "measured"):
            table.add_column(f"{side}, {kind}", justify="right")
    table.add_column("")
    lines = {line.asked.name: line for line in report.limits}
    for name in LIMIT_UNITS:
        line = lines.get(name)
        cells = [
            _cell(number)
            for side in (report.parent, report.child)
            for number in (side.predicted_figure(name), side.measured_figure(name))
        ]
        asked = f"{units.bound(line.limit)} ({line.asked.value:g}x)" if line and line.asked.relative else ""
        limit = asked or (units.bound(line.limit) if line else "")
        verdict = Text(line.verdict, _STYLES[line.verdict]) if line else Text()
        table.add_row(units.COST_NAMES[name], limit, *cells, verdict)
    return table


def _cell(number: Figure | None) -> Text:
    style = "dim italic" if number is not None and number.source == "estimated" else ""
    return Text(units.figure(number) + (" est." if style else ""), style)


def _models(report: Report) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for head in ("parameters", "hidden", "layers", "FFN widths", "heads", "file", "bits/weight"):
        table.add_column(head, justify="right")
    for who, side in (("parent", report.parent), ("child", report.child)):
        table.add_row(who, *_model_cells(side))
    return table


def _model_cells(side: Side) -> list[str]:
    layers = [layer for layer in side.shape.layers if not layer.dropped]

    def span(sizes: list[int]) -> str:
        low, high = (min(sizes), max(sizes)) if sizes else (0, 0)
        return f"{low:,}" if low == high else f"{low:,}–{high:,}"

    return [
        units.count(side.parameters),
        f"{side.shape.hidden:,}",
        str(len(layers)),
        span([layer.ffn for layer in layers]),
        span([layer.heads for layer in layers]),
        written(side.file_bytes, "B"),
        f"{side.bits_per_weight:.2f}",
    ]


def _quality(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for row in report.quality:
        kl = f"KL {row.kl_nats:.4f} nats/token" if row.kl_nats is not None else ""
        perplexity = f"perplexity {row.perplexity:.3f}" if row.perplexity is not None else ""
        table.add_row(row.what, perplexity, kl, f"{units.count(row.tokens)} tokens of {row.text}")
    for parity in report.parity:
        greedy = f"{parity.greedy_match} of {parity.greedy_tokens} greedy tokens" if parity.greedy_tokens else ""
        verdict = Text("same as PyTorch" if parity.passed else "NOT as in PyTorch", "green" if parity.passed else "red")
        table.add_row(f"{parity.artifact} in the engine", verdict, f"KL {parity.kl_nats:.1e}", greedy)
    return table
