"""Timing with llama-bench, for a folder of llama.cpp that holds its tools and no libllama."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from acc.backend_api import EngineInfo, Session
from acc.diag import AccError
from acc.target import Workload

if TYPE_CHECKING:
    import numpy as np

    from acc.backends.llamacpp.options import Options

NANO = 1e-9


class BenchSession(Session):
    """An artifact that can be timed and nothing else: every other question is answered with LC059."""

    def __init__(self, info: EngineInfo, artifact: Path, options: Options, timeout: float) -> None:
        self.info, self.options = info, options
        self.details: Mapping[str, Any] = {}
        self._artifact, self._timeout = artifact, timeout

    def time(self, workload: Workload) -> tuple[float, float]:
        """One round, for one request at a time: llama-bench's prompt test, and its generation test at that depth.

        llama-bench warms up, loads the model anew for each test, and does not choose tokens from the logits, which
        takes microseconds.

        Returns:
            TTFT and TPOT in seconds.

        Raises:
            AccError: LC059 for several requests at once; LC052, LC053 or LC056 if llama-bench fails.
        """
        if workload.batch != 1:
            _cannot(self.info.path, "several requests at once")
        prompt = self._run(["-p", str(workload.prompt), "-n", "0"])
        steps = max(1, workload.output - 1)
        decode = self._run(["-p", "0", "-n", str(steps), "-d", str(workload.prompt)])
        self.details = prompt
        return float(prompt["avg_ns"]) * NANO, float(decode["avg_ns"]) * NANO / steps

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Not here."""
        _cannot(self.info.path, "logits")

    def generate(self, tokens: Sequence[int], count: int) -> list[int]:
        """Not here."""
        _cannot(self.info.path, "tokens")

    def tokenize(self, text: str) -> list[int]:
        """Not here."""
        _cannot(self.info.path, "tokens")

    def memory(self) -> Mapping[str, int]:
        """Not here."""
        _cannot(self.info.path, "memory")

    def __enter__(self) -> BenchSession:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def _run(self, test: Sequence[str]) -> Mapping[str, Any]:
        """The one row of a llama-bench run of one repetition."""
        options = self.options
        command = [self.info.path, "-m", str(self._artifact), "-o", "json", "-r", "1", "-t", str(options.threads)]
        command += [
            "-b",
            str(options.batch),
            "-ub",
            str(options.ubatch),
            "-ctk",
            options.type_k,
            "-ctv",
            options.type_v,
        ]
        if options.flash_attn != "auto":
            command += ["-fa", {"on": "1", "off": "0"}[options.flash_attn]]
        if options.gpu_layers is not None:
            command += ["-ngl", str(options.gpu_layers)]
        name = Path(self.info.path).name
        try:
            done = subprocess.run([*command, *test], capture_output=True, text=True, timeout=self._timeout, check=False)
        except subprocess.TimeoutExpired:
            text = f"llama-bench was not done within {self._timeout:.0f} s and was stopped"
            raise AccError.of("LC053", name, text, "raise the engine option `timeout` (seconds)") from None
        except OSError as error:
            raise AccError.of("LC051", self.info.path, f"cannot be run: {error.strerror}", "build it again") from None
        if done.returncode != 0:
            last = " | ".join(done.stderr.strip().splitlines()[-3:])
            code = "LC052" if done.returncode < 0 else "LC056"
            raise AccError.of(
                code, name, f"llama-bench ended with {done.returncode}: {last}", f"see `acc explain {code}`"
            )
        row: Mapping[str, Any] = json.loads(done.stdout)[-1]
        return row


def _cannot(path: str, what: str) -> NoReturn:
    raise AccError.of(
        "LC059",
        path,
        f"this folder holds llama.cpp's tools and no libllama: it gives no {what}",
        "build it with -DBUILD_SHARED_LIBS=ON, or use the prebuilt engine (`pip install xllamacpp`)",
    )
