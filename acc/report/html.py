"""The report as one HTML page: style, charts and text in a single file that asks the network for nothing."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from acc.quantity import written
from acc.report import draw, units
from acc.report.data import Report
from acc.report.rows import fallback_rows, headline, note_rows, short_name


def render(report: Report) -> str:
    """The page."""
    environment = Environment(
        loader=PackageLoader("acc.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        report=report,
        units=units,
        written=written,
        draw=draw,
        rounds=[chart for chart in (draw.rounds(report, name) for name in draw.COSTS) if chart],
        title=f"{short_name(report.model)} for {report.target.name}",
        headline=headline(report),
        fallbacks=fallback_rows(report.child.fallbacks),
        notes=note_rows(report.notes),
    )


def write(report: Report, path: Path) -> None:
    """Write the page to `path`, by rename."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(render(report), "utf-8")
    partial.replace(path)
