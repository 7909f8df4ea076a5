"""What of a report is said in words or folded: title, headline, fallbacks by type, notes that say the same once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import PurePath

from acc.backend_api import TensorPlan
from acc.diag import Diagnostic
from acc.report.data import Report


def short_name(model: str) -> str:
    """A model as a title names it: the last part of a path, a hub id whole."""
    return PurePath(model).name if model.startswith(("/", ".", "~")) or model.endswith(".gguf") else model


def headline(report: Report) -> str:
    """The verdict in a few words, with what it rests on where that is not a measurement."""
    if not report.limits:
        return "no limits asked"
    told = {"kept": "every limit kept", "broken": "a limit is broken", "unknown": "not every limit could be judged"}
    sources = {line.judged_by for line in report.limits if line.verdict != "unknown"} - {"measured"}
    return told[report.verdict] + (f" ({', '.join(sorted(sources))}, not measured)" if sources else ", as measured")


def fallback_rows(tensors: Iterable[TensorPlan]) -> list[tuple[str, str, int, int]]:
    """Fallbacks as (wanted type, stored type, tensors, bytes), largest first."""
    count: Counter[tuple[str, str]] = Counter()
    size: Counter[tuple[str, str]] = Counter()
    for tensor in tensors:
        count[tensor.wanted, tensor.type] += 1
        size[tensor.wanted, tensor.type] += tensor.bytes
    return [(wanted, stored, count[wanted, stored], total) for (wanted, stored), total in size.most_common()]


def note_rows(notes: Iterable[Diagnostic]) -> list[tuple[Diagnostic, list[str]]]:
    """Notes that say the same, told once with every place they are about; errors first, then warnings."""
    places: dict[tuple[str, str, str], list[Diagnostic]] = {}
    for note in notes:
        places.setdefault((note.level, note.code, note.message), []).append(note)
    order = ("error", "warning", "note")
    grouped = sorted(places.values(), key=lambda group: order.index(group[0].level))
    return [(group[0], sorted({note.where for note in group if note.where})) for group in grouped]
