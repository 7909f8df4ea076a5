"""The command line, run as users run it, with the passes of the unit tests installed beside the built-in ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from command import Acc

PASSES = Path(__file__).parent.parent / "unit" / "passes_for_tests.py"
NAMES = {"options": "Options", "note": "Note", "read": "Read", "bad": "Bad"}


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that an installed package with the passes would look like."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(PASSES, folder)
    info = folder / "acc_test_passes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acc-test-passes\nVersion: 1.0\n")
    lines = [f"{name} = passes_for_tests:{cls}" for name, cls in NAMES.items()]
    (info / "entry_points.txt").write_text("\n".join(["[acc.passes]", *lines]) + "\n")
    return folder


@pytest.fixture
def acc(site: Path, tmp_path: Path) -> Acc:
    return Acc(site, tmp_path / "store")


@pytest.fixture(scope="session")
def state(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny IR as a file, for commands that need no model."""
    import json

    from passes_for_tests import tiny_ir

    path = tmp_path_factory.mktemp("state") / "tiny.json"
    path.write_text(json.dumps(tiny_ir().to_json()))
    return path
