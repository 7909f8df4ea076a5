"""Diagnostics: what acc says when something is wrong, in one sentence, with a hint that can be acted on."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from typing import Literal

Level = Literal["error", "warning", "note"]

EXIT_OK, EXIT_NO_FIT, EXIT_FAULT = 0, 1, 2


@dataclass(frozen=True)
class Diagnostic:
    """One finding.

    Attributes:
        code: `ACC` or a backend's prefix and three digits; `acc explain CODE` tells more.
        where: the file, tensor, dim, pass or option that it is about.
        message: one sentence.
        hint: what the user can do about it, or "".
        level: an error stops the work; a warning and a note are shown and kept in the report.
    """

    code: str
    where: str
    message: str
    hint: str = ""
    level: Level = "error"

    def __str__(self) -> str:
        head = f"{self.level}[{self.code}]: {self.where}: {self.message}"
        return f"{head}\n\nhint: {self.hint}" if self.hint else head


class AccError(Exception):
    """A user error or a fault of the surroundings, told as diagnostics; ends the command with `exit_code`."""

    exit_code = EXIT_FAULT

    def __init__(self, *diagnostics: Diagnostic) -> None:
        self.diagnostics = diagnostics
        super().__init__("\n".join(str(d) for d in diagnostics))

    @classmethod
    def of(cls, code: str, where: str, message: str, hint: str = "") -> AccError:
        """An error with one diagnostic."""
        return cls(Diagnostic(code, where, message, hint))


class NoArchFits(AccError):
    """The search found no architecture that keeps every limit: exit code 1."""

    exit_code = EXIT_NO_FIT


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint that names the closest known names, or lists all of them if none is close."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(f'`{c}`' for c in close)}?" if close else f"known: {', '.join(names)}"


def explanations() -> dict[str, str]:
    """Every code with its explanation, of the compiler (`acc/codes.toml`) and of its built-in backends."""
    found: dict[str, str] = {}
    roots = [resources.files("acc"), *(p for p in resources.files("acc.backends").iterdir() if p.is_dir())]
    for root in roots:
        table = root / "codes.toml"
        if table.is_file():
            found |= {code: str(text).strip() for code, text in tomllib.loads(table.read_text("utf-8")).items()}
    return found
