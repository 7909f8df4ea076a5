"""What the documentation shows is so: its code runs, commands exist, links lead somewhere, output is real."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from acc.cli import app
from acc.diag import explanations

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BY_NAME = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text("utf-8"), re.S)


def commands() -> list[str]:
    """Every `acc ...` of the pages: in indented and shell blocks, comments off, and in running text."""
    found = set()
    for page in PAGES:
        text = re.sub(r"```text\n.*?```", "", page.read_text("utf-8"), flags=re.S)
        shell = "\n".join(blocks(page, "sh")) + "\n".join(re.findall(r"^ {4}(.*)$", text, re.M))
        found |= set(re.findall(r"^(acc [a-z].*?)(?:\s+#.*)?$", shell, re.M))
        found |= set(re.findall(r"`(acc [a-z][^`]*)`", text))
    return sorted(found)


def test_there_are_commands_to_check() -> None:
    assert len(commands()) >= 10


@pytest.mark.parametrize("line", commands())
def test_commands_and_options_exist(line: str) -> None:
    words = shlex.split(line)[1:]
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        assert words[0] in command.commands, f"no command `{words[0]}`"
        command = command.commands[words.pop(0)]
    known = {option for parameter in command.params for option in parameter.opts}
    given = {word for word in words if word.startswith("-")}
    assert given <= known
    if command.name == "explain" and words[0] != "CODE":
        assert words[0] in explanations()


@BY_NAME
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)", page.read_text("utf-8")):
        assert (page.parent / link).exists(), link


@BY_NAME
def test_shown_output_is_what_was_kept(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    sys.modules.pop("docs_outputs", None)
    from docs_outputs import refreshed  # type: ignore[import-not-found, unused-ignore]

    text = page.read_text("utf-8")
    assert [
        name for name in re.findall(r"<!-- result: (\S+)", text) if not (ROOT / "docs/results" / name).exists()
    ] == []
    assert refreshed(text) == text, "run `python tools/docs_outputs.py --refresh`"


def test_the_pass_of_the_page_is_the_one_that_is_tested() -> None:
    (code,) = blocks(ROOT / "docs" / "writing-a-pass.md", "python")
    assert code in (ROOT / "tests" / "plugin" / "acc_eager" / "round_ffn.py").read_text("utf-8")


def test_the_target_file_of_the_page_is_read(tmp_path: Path) -> None:
    from acc.targetfiles import load

    (code,) = blocks(ROOT / "docs" / "targets-and-limits.md", "toml")
    path = tmp_path / "mine.toml"
    path.write_text(code)
    target = load(str(path), cache_file=tmp_path / "speeds.json")
    assert (target.name, target.workload.held, target.device.here) == ("desk-assistant", 8192, False)
    assert {limit.name: limit.value for limit in target.limits} == {"tpot": 0.008, "memory": 6 * 2**30}
