"""The child process that runs llama.cpp, seen from acc: requests with time limits, every failure a diagnostic."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from acc.diag import AccError

START_SECONDS = 120.0
LOG_TAIL = 6
SHARED_BYTES = 2 << 30
"""Room that shared memory must have to be used: containers often have 64 MiB of it, less than one pass's logits."""


class Child:
    """The child process that has one libllama loaded. Use as a context manager, or `close` it."""

    def __init__(self, library: Path, *, timeout: float) -> None:
        """Start the process and wait until it has loaded the library.

        Args:
            timeout: seconds that any later request may take.

        Raises:
            AccError: LC051 the library does not load; LC052 it crashes on loading.
        """
        self.library = library
        self.timeout = timeout
        self._scratch = tempfile.TemporaryDirectory(prefix="acc-engine-", dir=_scratch_root())
        self.scratch = Path(self._scratch.name)
        self._log = self.scratch / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "acc.backends.llamacpp.worker", str(library)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                encoding="utf-8",
            )
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._fault: AccError | None = None
        threading.Thread(target=_pump, args=(self.process, self._answers), daemon=True).start()
        # A session that is never closed still takes its process and files along.
        self._finalizer = weakref.finalize(self, _end, self.process, self._scratch)
        self._read("load the library", START_SECONDS)

    def ask(self, do: str, *, timeout: float | None = None, **arguments: Any) -> Any:
        """Carry out one request in the child (`Worker.do_<do>`).

        Raises:
            AccError: whatever went wrong there: refused, out of memory (LC054), crashed (LC052), too slow (LC053).
        """
        assert self.process.stdin is not None
        if self._fault is not None:
            raise self._fault  # it has ended, and this is why
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
        except (OSError, ValueError):  # the pipe is broken or closed: the process has ended
            raise self._over(self._ended(do)) from None
        return self._read(do, self.timeout if timeout is None else timeout)

    def close(self) -> None:
        """End the process."""
        self._finalizer()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, do: str, timeout: float) -> Any:
        try:
            line = self._answers.get(timeout=timeout)
        except queue.Empty:
            self.process.kill()
            text = f"llama.cpp gave no answer to `{do}` within {timeout:.0f} s and was stopped"
            hint = "raise the engine option `timeout` (seconds) if the device is this slow; otherwise run `acc doctor`"
            raise self._over(AccError.of("LC053", self.library.name, text, hint)) from None
        except BaseException:  # interrupted: an answer that comes later must not be taken for the next one's
            self.process.kill()
            raise
        if line is None:
            raise self._over(self._ended(do))
        answer = json.loads(line)
        if "error" in answer:
            raise self._refused(do, answer["error"])
        return answer["ok"]

    def _over(self, fault: AccError) -> AccError:
        """Keep why the process ended, for whoever asks it again."""
        self._fault = fault
        return fault

    def _ended(self, do: str) -> AccError:
        code = self.process.wait()
        if code in (-9, 137):
            return AccError.of(
                "LC054",
                self.library.name,
                f"the llama.cpp process was killed during `{do}`: most likely the machine ran out of memory",
                "lower the context, the batch or the model's size, or free memory",
            )
        how = _signal_name(-code) if code < 0 else f"exit code {code}"
        hint = f"its last words: {self._tail()}"
        if code < 0 and -code in (signal.SIGILL, signal.SIGSEGV, getattr(signal, "SIGBUS", 7)):
            hint = (
                "a library that was built for instructions which this machine does not grant dies like this (AMX in a "
                f"virtual machine): `acc doctor` tells, `acc engine build llamacpp` builds a fitting one; {hint}"
            )
        return AccError.of("LC052", self.library.name, f"llama.cpp crashed during `{do}` ({how})", hint)

    def _refused(self, do: str, error: Mapping[str, str]) -> AccError:
        kind, message, log = error["kind"], error["message"], error.get("log", "")
        told = f"{message}: {log}" if log else message
        if kind == "library":
            return AccError.of(
                "LC051",
                str(self.library),
                f"this library is not usable: {told}",
                "install the prebuilt engine with `pip install xllamacpp`, or run `acc engine build llamacpp`",
            )
        if kind == "layout":
            return AccError.of(
                "LC055",
                str(self.library),
                f"this version of llama.cpp is laid out differently than acc knows: {told}",
                "use the prebuilt engine (`pip install xllamacpp`), or leave the engine option at its default",
            )
        if kind == "memory":
            return AccError.of(
                "LC054",
                self.library.name,
                f"llama.cpp ran out of memory during `{do}`: {told}",
                "lower the context, the batch or the model's size, or free memory",
            )
        if kind == "files":
            hint = "free room there, or set TMPDIR to a folder that has some"
            return AccError.of("LC066", str(self.scratch), f"an array cannot be handed over: {message}", hint)
        code = "LC057" if kind == "rows" else "LC056"
        return AccError.of(
            code, self.library.name, f"llama.cpp refused `{do}`: {told}", "see `acc explain " + code + "`"
        )

    def _tail(self) -> str:
        try:
            lines = self._log.read_text("utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        return " | ".join(line.strip() for line in lines[-LOG_TAIL:] if line.strip())


def _scratch_root() -> str | None:
    """Shared memory where there is enough: logits and rows pass through it."""
    try:
        roomy = shutil.disk_usage("/dev/shm").free >= SHARED_BYTES
    except OSError:
        return None
    return "/dev/shm" if roomy and os.access("/dev/shm", os.W_OK) else None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _pump(process: subprocess.Popen[str], answers: queue.Queue[str | None]) -> None:
    """Hand over the lines of the child as they come; None at the end."""
    assert process.stdout is not None
    for line in process.stdout:
        answers.put(line)
    answers.put(None)


def _end(process: subprocess.Popen[str], scratch: tempfile.TemporaryDirectory[str]) -> None:
    """Stop a child and remove its files."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):  # it has ended already
            process.stdin.close()
    try:
        process.wait(timeout=2)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    scratch.cleanup()
