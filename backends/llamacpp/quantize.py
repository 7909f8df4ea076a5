"""Quantising in the engine's own code, so that what acc writes is what llama.cpp's quantiser would write."""

from __future__ import annotations

import os
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING

from acc.diag import AccError

if TYPE_CHECKING:
    import numpy as np

    from acc.backends.llamacpp.child import Child

QUANTIZE_SECONDS = 1800.0


class Quantizer:
    """Quantises tensors in a child process; a context manager, so that the process lives as long as the work."""

    def __init__(self, *, threads: int = 2) -> None:
        """Start the engine that is preferred here.

        Args:
            threads: row chunks quantised at once.

        Raises:
            AccError: LC050 if there is no engine.
        """
        from acc.backends.llamacpp.child import Child
        from acc.backends.llamacpp.discover import library_for_quantizing

        self.threads = min(threads, os.cpu_count() or 1)
        self._child: Child = Child(library_for_quantizing(), timeout=QUANTIZE_SECONDS)
        self._number = 0

    def rows(self, type_name: str, array: np.ndarray, importance: np.ndarray | None = None) -> bytes:
        """The rows as they are stored in a GGUF file.

        Args:
            type_name: a ggml type, such as `Q4_K`, `Q8_0`, `F16`, `BF16`, `IQ4_XS`.
            array: float32 [rows, cols].
            importance: float32 [cols] above 0, usually the mean square of what each column is multiplied with.

        Raises:
            AccError: LC057 for an unknown type, columns that do not fill its blocks, values or importances that are
                not finite.
        """
        import numpy as np
        from gguf import GGMLQuantizationType

        name = type_name.upper()
        if name not in GGMLQuantizationType.__members__:
            raise AccError.of("LC057", type_name, "is no type of the GGUF format", "use a name such as Q4_K or Q8_0")
        if array.ndim != 2 or array.dtype != np.float32:
            raise ValueError(f"float32 [rows, cols] is wanted, not {array.dtype} {list(array.shape)}")
        scratch = self._child.scratch
        source, weights, out = scratch / "rows.npy", scratch / "importance.npy", scratch / "rows.bin"
        np.save(source, array)
        if importance is not None:
            if importance.shape != array.shape[1:] or not np.isfinite(importance).all() or (importance < 0).any():
                raise AccError.of(
                    "LC057",
                    name,
                    "the importances are not one finite number of at least 0 per column",
                    "calibrate again",
                )
            np.save(weights, importance.astype(np.float32))
        try:
            self._child.ask(
                "quantize",
                rows=str(source),
                importance=None if importance is None else str(weights),
                type=int(GGMLQuantizationType[name]),
                name=name,
                threads=self.threads,
                out=str(out),
            )
            return out.read_bytes()
        finally:
            for path in (source, weights, out):
                path.unlink(missing_ok=True)

    @property
    def alive(self) -> bool:
        """Whether the child process runs."""
        return self._child.process.poll() is None

    def close(self) -> None:
        """End the child process."""
        self._child.close()

    def __enter__(self) -> Quantizer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def quantize_rows(type_name: str, array: np.ndarray, importance: np.ndarray | None = None) -> bytes:
    """`Quantizer.rows` in a child process that is started on first use and kept until acc ends."""
    quantizer = _kept()
    try:
        return quantizer.rows(type_name, array, importance)
    except AccError:
        if not quantizer.alive:
            _kept.cache_clear()  # the next tensor gets a fresh process
        raise


@cache
def _kept() -> Quantizer:
    return Quantizer()
