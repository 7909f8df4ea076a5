"""Names over entry points: collisions, broken plug-ins, and what listing imports."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest

from acc.diag import AccError
from acc.passes_api import Pass
from acc.registry import Registry


def _registry(monkeypatch: pytest.MonkeyPatch, *entries: tuple[str, str, str]) -> Registry[type[Pass]]:
    """A registry over made-up packages: (name, value, package)."""
    points = []
    for name, value, package in entries:
        point = EntryPoint(name, value, "acc.passes")
        object.__setattr__(point, "dist", SimpleNamespace(name=package, version="1.0"))
        points.append(point)
    real = metadata.entry_points
    monkeypatch.setattr(metadata, "entry_points", lambda group: points if group == "acc.passes" else real(group=group))
    return Registry("acc.passes", "pass", "acc.passes_api:Pass")


def _fault(found: Registry[type[Pass]], name: str) -> str:
    with pytest.raises(AccError) as caught:
        found.load(name)
    return str(caught.value)


def test_two_packages_with_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _registry(monkeypatch, ("cut", "one.cut:Cut", "one"), ("cut", "two.cut:Cut", "two"))
    text = (
        "error[ACC302]: cut: pass is claimed by `one.cut:Cut` of package `one 1.0` and `two.cut:Cut` of package "
        "`two 1.0`\n\nhint: uninstall one of them"
    )
    assert _fault(found, "cut") == text
    assert [str(one) for one in found.collisions()] == [text]


def test_a_broken_plug_in_does_not_harm_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _registry(
        monkeypatch,
        ("gone", "no_such_module_of_anybody:Pass", "bad"),
        ("json", "json:JSONDecoder", "odd"),
        ("other", "acc.passes.analysis.calibrate:Calibrate", "misnamed"),
        ("calibrate", "acc.passes.analysis.calibrate:Calibrate", "acc"),
    )
    assert found.names() == ["calibrate", "gone", "json", "other"]
    assert found.load("calibrate").name == "calibrate"
    assert _fault(found, "gone") == (
        "error[ACC303]: gone: pass `no_such_module_of_anybody:Pass` of package `bad 1.0` cannot be imported: "
        "ModuleNotFoundError: No module named 'no_such_module_of_anybody'\n\nhint: mend or uninstall it"
    )
    assert "is not a subclass of acc.passes_api.Pass" in _fault(found, "json")
    assert "calls itself `calibrate`, its entry point says `other`" in _fault(found, "other")


def test_unknown_names_suggest_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _registry(monkeypatch, ("calibrate", "a:A", "acc"), ("slice", "a:B", "acc"))
    assert _fault(found, "calibrat") == "error[ACC301]: calibrat: unknown pass\n\nhint: did you mean `calibrate`?"
    assert _fault(found, "zzz") == "error[ACC301]: zzz: unknown pass\n\nhint: known: calibrate, slice"


@pytest.mark.parametrize("what", ["passes", "backends", "targets", "devices", "workloads", "efforts"])
def test_listing_imports_nothing_heavy(what: str) -> None:
    code = (
        "import sys\nfrom acc.cli import app\n"
        f"try: app(['ls', '{what}'])\nexcept SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'transformers', 'gguf', 'scipy', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
