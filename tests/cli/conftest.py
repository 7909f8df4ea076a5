"""The command line, run as users run it, with the passes of the unit tests installed beside the built-in ones."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

PASSES = Path(__file__).parent.parent / "unit" / "passes_for_tests.py"
NAMES = {"options": "Options", "note": "Note", "read": "Read", "bad": "Bad"}


class Acc:
    """Runs `acc` in child processes over one store."""

    def __init__(self, site: Path, store: Path) -> None:
        self.store = store
        self.environment = {**os.environ, "PYTHONPATH": str(site), "ACC_STORE": str(store), "COLUMNS": "160"}
        self.program = str(Path(sys.executable).parent / "acc")

    def start(self, *arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
        """Start a command and go on."""
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        return subprocess.Popen([self.program, *map(str, arguments)], env=self.environment, text=True, **streams)

    def __call__(self, *arguments: str | Path, code: int = 0, prefix: Sequence[str] = ()) -> tuple[str, str]:
        """Run a command to its end: stdout and stderr. Fails if it ends with another exit code, or with a traceback."""
        command = [*prefix, self.program, *map(str, arguments)]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout, done.stderr


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

    sys.path.insert(0, str(PASSES.parent))
    from passes_for_tests import tiny_ir

    path = tmp_path_factory.mktemp("state") / "tiny.json"
    path.write_text(json.dumps(tiny_ir().to_json()))
    return path
