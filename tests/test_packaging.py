"""The wheel holds the tree and nothing else; `passes/` and `backends/` import as `acc.passes`, `acc.backends` only."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINKS = ("acc/passes", "acc/backends")


def tree() -> list[str]:
    """Every file of the work tree that git tracks or would track."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: there is no list of files to compare with")
    command = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return [name for name in listed if (ROOT / name).exists()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy so that the work tree stays clean."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in tree():
        copy = folder / "source" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy, follow_symlinks=False)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "-w", str(folder), str(folder / "source")], check=True)
    return next(folder.glob("acc-*.whl"))


def test_wheel_holds_the_tree_and_nothing_else(wheel: Path) -> None:
    expected = {
        name if name.startswith("acc/") else f"acc/{name}"
        for name in tree()
        if name.split("/")[0] in ("acc", "passes", "backends") and name not in LINKS
    }
    names = zipfile.ZipFile(wheel).namelist()
    packed = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert packed == expected


def test_folders_are_linked_into_the_package() -> None:
    for link in LINKS:
        path = ROOT / link
        assert path.is_symlink()
        assert path.resolve() == ROOT / path.name


@pytest.mark.parametrize("name", ["passes", "backends"])
def test_folders_refuse_to_be_imported_as_they_stand(name: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1
    assert f"import `acc.{name}`, not `{name}`" in ran.stderr
