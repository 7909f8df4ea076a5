"""The engine's child process: `python -m acc.backends.llamacpp.worker LIBRARY [ORDER]`.

One JSON object per line: requests on standard input, answers on what was standard output (which the engine and
everything else now write to standard error instead). Arrays travel as .npy files, named in the request. An answer is
`{"ok": ...}` or `{"error": {"kind": ..., "message": ...}}`; a crash is the end of the pipe. The process ends when its
input does, so it does not outlive acc.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from acc.backends.llamacpp.buffers import buffers, flash_attention
from acc.backends.llamacpp.layout import UnknownLayout
from acc.backends.llamacpp.library import Library
from acc.backends.llamacpp.loaded import Loaded, LoadFailed
from acc.backends.llamacpp.options import Options
from acc.backends.llamacpp.quantizer import BadRows, quantize

OUT_OF_MEMORY = re.compile(
    r"failed to allocate|unable to allocate|insufficient memory|out of memory|cannot allocate", re.IGNORECASE
)


class Worker:
    """Answers requests; holds the library and at most one model."""

    def __init__(self, library: Library) -> None:
        self._lib = library
        self._loaded: Loaded | None = None
        self._at_load: dict[str, Any] = {}
        self._log_start = self._errors_start = 0

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out one request; every expected failure becomes an error answer."""
        self._log_start, self._errors_start = len(self._lib.lines), len(self._lib.errors)
        arguments = {key: value for key, value in request.items() if key != "do"}
        method: Callable[..., Any] = getattr(self, f"do_{request['do']}")
        try:
            return {"ok": method(**arguments)}
        except UnknownLayout as error:
            return {"error": {"kind": "layout", "message": str(error)}}
        except BadRows as error:
            return {"error": {"kind": "rows", "message": str(error)}}
        except OSError as error:
            return {"error": {"kind": "files", "message": error.strerror or str(error)}}
        except (LoadFailed, MemoryError) as error:
            return {"error": self._failure(error)}

    def do_info(self) -> dict[str, Any]:
        """What this library is: version, build flags, devices other than the CPU."""
        return {
            "version": self._lib.text("llama_version"),
            "ggml": self._lib.text("ggml_version"),
            "commit": self._lib.text("ggml_commit"),
            "build": self._lib.text("llama_print_system_info"),
            "devices": self._lib.devices(),
        }

    def do_load(self, path: str, options: dict[str, Any]) -> dict[str, Any]:
        """Load a model; its buffers are read from the log now, before any request makes them grow."""
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None
        self._loaded = Loaded(self._lib, path, Options(**options))
        lines = self._lib.lines[self._log_start :]
        self._at_load = {
            **self._loaded.describe(),
            "flash_attn_used": flash_attention(lines),
            "buffers": buffers(lines),
        }
        return self._at_load

    def do_tokenize(self, text: str) -> list[int]:
        """Tokens of a text."""
        return self._model.tokenize(text)

    def do_detokenize(self, tokens: list[int]) -> str:
        """Text of tokens."""
        return self._model.detokenize(tokens)

    def do_logits(self, tokens: list[int], out: str) -> list[int]:
        """Write float32 [tokens, vocab] to the file `out`; the answer is its shape."""
        logits = self._model.logits(tokens)
        np.save(out, logits)
        return list(logits.shape)

    def do_generate(self, tokens: list[int], count: int) -> list[int]:
        """Greedy tokens."""
        return self._model.generate(tokens, count)

    def do_warm_up(self, prompt: int) -> None:
        """Run the model once, unmeasured."""
        self._model.warm_up(prompt)

    def do_time(self, prompt: int, output: int) -> dict[str, Any]:
        """One round: seconds to the first token, and of every further one."""
        first, steps = self._model.time(prompt, output)
        return {"first": first, "steps": steps}

    def do_peak(self) -> int:
        """Peak resident set of this process, bytes."""
        return peak_rss()

    def do_quantize(self, rows: str, importance: str | None, type: int, name: str, threads: int, out: str) -> int:
        """Quantise float32 [rows, cols] of a .npy file into the file `out`; the answer is its number of bytes."""
        values = np.load(rows, mmap_mode="r")
        weights = None if importance is None else np.load(importance)
        data = quantize(self._lib, type, name, values, weights, threads)
        Path(out).write_bytes(data)
        return len(data)

    @property
    def _model(self) -> Loaded:
        if self._loaded is None:
            raise LoadFailed("no model is loaded")
        return self._loaded

    def _failure(self, error: Exception) -> dict[str, str]:
        told = self._lib.errors[self._errors_start :]
        memory = isinstance(error, MemoryError) or any(OUT_OF_MEMORY.search(line) for line in told)
        return {
            "kind": "memory" if memory else "engine",
            "message": str(error) or "out of memory",
            "log": told[0] if told else "",
        }


def peak_rss() -> int:
    """Peak resident set of this process, bytes."""
    try:
        status = Path("/proc/self/status").read_text("ascii")
        return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status).group(1))  # type: ignore[union-attr]
    except (OSError, AttributeError):
        import psutil

        memory = psutil.Process().memory_info()
        return int(getattr(memory, "peak_wset", memory.rss))


def requests(stream: TextIO) -> Iterator[dict[str, Any]]:
    """The requests of a stream of JSON lines."""
    for line in stream:
        yield json.loads(line)


def main() -> None:
    """Load the library, say so, then answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        worker = Worker(Library(Path(sys.argv[1])))
    except (OSError, UnknownLayout) as error:
        send({"error": {"kind": "library", "message": str(error)}})
        return
    send({"ok": "ready"})
    for request in requests(sys.stdin):
        send(worker.answer(request))


if __name__ == "__main__":
    main()
