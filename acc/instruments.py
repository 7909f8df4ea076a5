"""Instruments of the PassManager: dumps with diffs, progress on the terminal, time and memory of each stage."""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from acc.manager import Instrument, Stage, StageRecord
from acc.store import atomic, writing

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from acc.ir import ModelIR


class Meter:
    """Wall seconds of a `with` block, and the most resident memory of this process and its children in it, sampled."""

    def __init__(self, interval: float = 0.1) -> None:
        self.seconds, self.peak_rss_bytes = 0.0, 0
        self._interval, self._done = interval, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Meter:
        self._start = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._start
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        import psutil

        me = psutil.Process()
        while True:
            resident = 0
            for process in [me, *me.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    resident += process.memory_info().rss
            self.peak_rss_bytes = max(self.peak_rss_bytes, resident)
            if self._done.wait(self._interval):
                return


@contextlib.contextmanager
def stdout_aside() -> Iterator[None]:
    """Send to stderr what C libraries print meanwhile: stdout is for data (HiGHS prints there whatever it is told)."""
    try:
        saved = os.dup(1)
    except OSError:  # no stdout at all
        yield
        return
    sys.stdout.flush()
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)


class Dump(Instrument):
    """Writes the text of the IR after each pass, `003-slice.acc`, and what changed, `003-slice.diff`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with writing(folder, "make the folder of dumps"):
            folder.mkdir(parents=True, exist_ok=True)

    def after(self, record: StageRecord, before: ModelIR, after: ModelIR) -> None:
        from acc import text

        name = f"{record.stage.number:03d}-{record.stage.one.name}"
        old, new = text.format(before), text.format(after)
        diff = difflib.unified_diff(old.splitlines(True), new.splitlines(True), "before", "after")
        for suffix, content in ((".acc", new), (".diff", "".join(diff))):
            path = self.folder / (name + suffix)
            with writing(self.folder, f"write {path.name}"), atomic(path) as temporary:
                temporary.write_text(content, "utf-8")


class Progress(Instrument):
    """One line per stage on stderr; a bar while it runs if stderr is a terminal."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        self.console = console
        columns = (
            TextColumn("{task.description}"),
            BarColumn(20),
            TextColumn("{task.fields[what]}"),
            TimeElapsedColumn(),
        )
        self._bars = Bars(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task: TaskID | None = None

    def before(self, stage: Stage, ir: ModelIR) -> None:
        self._bars.start()
        self._task = self._bars.add_task(_title(stage), total=None, what="")

    def progress(self, stage: Stage, step: int, total: int, what: str) -> None:
        if self._task is not None:
            self._bars.update(self._task, completed=step, total=total, what=what)

    def after(self, record: StageRecord, before: ModelIR, after: ModelIR) -> None:
        self._stop()
        took = "from the store" if record.stored else f"{record.seconds:.1f} s, {record.peak_rss_bytes / 2**20:.0f} MiB"
        self.console.print(f"{_title(record.stage)}  {took}", highlight=False, markup=False)

    def failed(self, stage: Stage) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._task is not None:
            self._bars.remove_task(self._task)
            self._task = None
        self._bars.stop()


def _title(stage: Stage) -> str:
    return f"[{stage.number}/{stage.total}] {stage.spec}"
