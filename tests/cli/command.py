"""The command line, run as users run it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


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
