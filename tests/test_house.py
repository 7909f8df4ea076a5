"""The rules of the house: acc knows no algorithm and no engine, diagnostics are explained, files stay short."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from acc.diag import explanations

ROOT = Path(__file__).parent.parent
FOLDERS = ("acc", "passes", "backends", "tools")
SOURCES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if not any((ROOT / folder / part).is_symlink() for part in path.relative_to(ROOT / folder).parts[:1])
)
LINES_OF_A_FILE, LINES_OF_A_FUNCTION = 350, 50
BY_FILE = pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def test_all_four_folders_are_looked_at() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in SOURCES} == set(FOLDERS)


@pytest.mark.parametrize("path", [p for p in SOURCES if p.is_relative_to(ROOT / "acc")], ids=lambda path: path.name)
def test_acc_imports_neither_passes_nor_backends(path: Path) -> None:
    assert [name for name in imports(path) if re.match(r"acc\.(passes|backends)(\.|$)", name)] == []


@BY_FILE
def test_files_and_functions_stay_short(path: Path) -> None:
    text = path.read_text("utf-8")
    assert len(text.splitlines()) <= LINES_OF_A_FILE
    long = {
        node.name: lines
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > LINES_OF_A_FUNCTION
        # The command line declares its options as parameters: a signature is no length of code.
        and lines - (node.body[0].lineno - node.lineno) > LINES_OF_A_FUNCTION
    }
    assert long == {}


def test_every_diagnostic_is_explained_and_every_explanation_is_used() -> None:
    used = {code for path in SOURCES for code in re.findall(r"[\"'`]((?:ACC|LC)\d{3})[\"'`]", path.read_text("utf-8"))}
    known = set(explanations())
    assert sorted(used - known) == [], "say what they mean in codes.toml"
    assert sorted(known - used) == [], "nothing raises these"
