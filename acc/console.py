"""What users see: diagnostics and progress on stderr, data on stdout, exit codes. The commands are in `acc.cli`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from acc.diag import EXIT_FAULT, AccError, Diagnostic
from acc.store import disk_error

if TYPE_CHECKING:
    from rich.console import Console

EXIT_INTERRUPTED = 130
WIDE = 160
"""Columns of tables that nobody looks at in a terminal."""
_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}


@cache
def err() -> Console:
    """Logs, progress and diagnostics."""
    from rich.console import Console

    return Console(stderr=True, soft_wrap=True)


@cache
def out() -> Console:
    """Data."""
    from rich.console import Console

    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(soft_wrap=True, width=WIDE if piped else None)


def say(text: str) -> None:
    """One line for people, on stderr."""
    err().print(text, highlight=False, markup=False)


def tell(diagnostics: Iterable[Diagnostic]) -> None:
    """Diagnostics, on stderr."""
    from rich.text import Text

    for one in diagnostics:
        text = Text(str(one))
        text.stylize(f"bold {_COLOURS[one.level]}", 0, len(one.level))
        err().print(text, highlight=False)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> None:
    """A table, on stdout; numbers are set to the right."""
    from rich import box
    from rich.table import Table

    drawn = Table(*columns, title=title or None, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    filled = [[str(cell) for cell in row] for row in rows]
    for index, column in enumerate(drawn.columns):
        column.overflow = "fold"
        cells = [row[index] for row in filled if row[index]]
        if cells and all(cell.replace(",", "").replace(".", "").lstrip("-").split(" ")[0].isdigit() for cell in cells):
            column.justify = "right"
    for row in filled:
        drawn.add_row(*row)
    out().print(drawn, markup=False, highlight=False)


def emit(value: Any) -> None:
    """A JSON value, on stdout."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


class Guarded(TyperGroup):
    """A group of commands whose faults are told in words; only `--debug` shows tracebacks."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; end with the exit code of what went wrong."""
        try:
            return super().invoke(ctx)
        except (Exception, KeyboardInterrupt) as error:
            ours = hasattr(error, "exit_code") and not isinstance(error, AccError)  # Typer's own ways to end
            bug_hunt = ctx.params.get("debug") and not isinstance(error, KeyboardInterrupt)
            if ours or isinstance(error, typer.Abort) or bug_hunt:
                raise
            ctx.exit(report_fault(error))


def report_fault(error: Exception | KeyboardInterrupt) -> int:
    """Tell a fault in words, on stderr; the exit code that it ends the command with."""
    if isinstance(error, AccError):
        tell(error.diagnostics)
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        say(f"interrupted in {error}" if str(error) else "interrupted")
        if str(error):
            say("finished passes are kept: the same command goes on from there")
        return EXIT_INTERRUPTED
    if isinstance(error, BrokenPipeError):  # the reader of our data went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAULT
    told = disk_error(error, Path.cwd(), "go on")
    if told is None:
        hint = "this is a bug of acc; `acc --debug ...` shows where"
        told = AccError.of("ACC399", "acc", f"{type(error).__name__}: {error}", hint)
    tell(told.diagnostics)
    return EXIT_FAULT
