"""A session with llama.cpp: an artifact loaded in a child process; its logits, tokens, time and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from acc.backend_api import EngineInfo, Session
from acc.backends.llamacpp.buffers import mapped, rearranged, second_embedding, total
from acc.backends.llamacpp.child import Child
from acc.diag import AccError
from acc.target import Target, Workload

if TYPE_CHECKING:
    import numpy as np

    from acc.backends.llamacpp.bench_tool import BenchSession
    from acc.backends.llamacpp.options import Options


class LlamaSession(Session):
    """An artifact loaded in a child process.

    Attributes:
        info: the engine that runs it.
        details: how it was loaded (threads, batch, cache types, flash attention asked and used ...), for the records.
    """

    def __init__(self, child: Child, info: EngineInfo, artifact: Path, options: Options) -> None:
        self._child = child
        self.info = info
        self.options = options
        self._artifact = artifact
        if not artifact.is_file():
            raise AccError.of("LC056", str(artifact), "there is no such file", "give the GGUF file itself")
        self.details: Mapping[str, Any] = child.ask("load", path=str(artifact), options=asdict(options))
        self._warm_for: set[int] = set()

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits of every position, float32 [tokens, vocab]."""
        import numpy as np

        self._fits(len(tokens))
        out = self._child.scratch / "logits.npy"
        self._child.ask("logits", tokens=[int(token) for token in tokens], out=str(out))
        logits: np.ndarray = np.load(out)
        out.unlink()
        return logits

    def generate(self, tokens: Sequence[int], count: int) -> list[int]:
        """`count` tokens, greedily; an end token does not stop it."""
        self._fits(len(tokens) + count)
        return list(self._child.ask("generate", tokens=[int(token) for token in tokens], count=count))

    def tokenize(self, text: str) -> list[int]:
        """The engine's own tokens of a text, special tokens parsed, no BOS added."""
        return list(self._child.ask("tokenize", text=text))

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special tokens included."""
        return str(self._child.ask("detokenize", tokens=[int(token) for token in tokens]))

    def time(self, workload: Workload) -> tuple[float, float]:
        """One round of a workload on an empty cache, with `workload.batch` requests at once.

        Returns:
            TTFT: seconds from handing over the prompts until the first token of every request is chosen; the prompts
            are decoded in calls of at most `n_batch` tokens, several prompts in one call where they fit.
            TPOT: median seconds of the `workload.output - 1` decodes that follow, each one token of every request at
            the depth that it has then, with choosing the next token.
        """
        first, steps = self.round(workload)
        return first, median(steps)

    def round(self, workload: Workload) -> tuple[float, list[float]]:
        """As `time`, with the seconds of every single decode after the first token."""
        if workload.batch != self.options.sequences:
            raise ValueError(f"opened for {self.options.sequences} requests at once, asked to time {workload.batch}")
        self._fits(workload.prompt + workload.output)
        output = max(2, workload.output)  # one decode after the first token is the least that has a TPOT
        if workload.prompt not in self._warm_for:
            self._child.ask("warm_up", prompt=workload.prompt)
            self._warm_for.add(workload.prompt)
        answer = self._child.ask("time", prompt=workload.prompt, output=output)
        return float(answer["first"]), [float(step) for step in answer["steps"]]

    def memory(self) -> Mapping[str, int]:
        """Bytes that the engine needs resident, as it says itself when it has loaded the artifact.

        `weights`, `kv`, `compute` and `output` are summed over all devices; `total` is their sum. Weights count as
        often as the engine computes from them: once, but a tied embedding whose output copy is rearranged or lies on a
        GPU counts twice. Pages of the mapped file from which a rearranged copy was made do not count: they are never
        read again, and the system drops them when it needs room. Beside it, not part of the total: `mapped`,
        `repacked` (the copies), and `peak_rss`, the most that the process held, those pages and Python included.
        """
        from acc.checkpoint.gguf_header import read_header

        found: Mapping[str, int] = self.details["buffers"]
        twice = second_embedding(read_header(self._artifact).tensors.values(), found)
        parts = {"weights": int(self.details["weight_bytes"]) + twice}
        parts |= {kind: total(found, kind) for kind in ("kv", "compute", "output")}
        return {
            **parts,
            "total": sum(parts.values()),
            "mapped": mapped(found),
            "repacked": rearranged(found),
            "peak_rss": int(self._child.ask("peak")),
        }

    def close(self) -> None:
        """End the child process."""
        self._child.close()

    def __enter__(self) -> LlamaSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fits(self, tokens: int) -> None:
        if not 0 < tokens <= self.options.context:
            raise ValueError(f"{tokens} tokens do not fit the context of {self.options.context} that was opened")


def open_session(artifact: Path, target: Target, *, context: int, batch: int = 1) -> LlamaSession | BenchSession:
    """Load a GGUF file in the engine that the target's options name, or the preferred one here.

    Args:
        context: tokens that each request may hold.
        batch: requests at once.

    Raises:
        AccError: no engine, a bad option, a file that the engine does not load, a crash, a hang, no memory.
    """
    from acc.backends.llamacpp.bench_tool import BenchSession
    from acc.backends.llamacpp.discover import choose
    from acc.backends.llamacpp.options import options_for, timeout_for

    options = options_for(target, context=context, batch=batch)
    timeout = timeout_for(target)
    info = choose(target.engine_options)
    if "logits" not in info.can:
        return BenchSession(info, artifact, options, timeout)
    child = Child(Path(info.path), timeout=timeout)
    try:
        return LlamaSession(child, info, artifact, options)
    except BaseException:
        child.close()
        raise
