"""Quantising rows with ggml's own code; runs in the engine's child process only."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from acc.backends.llamacpp.library import Library

CHUNKS_PER_THREAD = 4


class BadRows(Exception):
    """These rows cannot be stored in this type; the text says why. ggml itself would abort the process."""


def quantize(
    lib: Library, type_id: int, name: str, rows: np.ndarray, importance: np.ndarray | None, threads: int
) -> bytes:
    """The rows in a ggml type.

    Args:
        type_id, name: the type's number in the GGUF format, and the name that the library must give it.
        rows: float32 [rows, cols].
        importance: float32 [cols], positive: how much an error in each column matters (mean squared activation).
        threads: row chunks quantised at once.

    Raises:
        BadRows: columns that do not fit the type's blocks, values that are not finite, an unknown type.
    """
    told = (lib.ggml_type_name(type_id) or b"").decode()
    if told.lower() != name.lower():
        raise BadRows(f"type {type_id} is `{told}` in this library, not `{name}`")
    count, columns = rows.shape
    block = lib.ggml_blck_size(type_id)
    if columns % block:
        raise BadRows(f"{name} stores blocks of {block} columns, and {columns} is no multiple of that")
    if importance is None and lib.ggml_quantize_requires_imatrix(type_id):
        raise BadRows(f"{name} needs an importance per column")
    lib.ggml_quantize_init(type_id)  # the tables, before threads race for them
    row_bytes = lib.ggml_row_size(type_id, columns)
    out = np.empty((count, row_bytes), np.uint8)
    weights = None if importance is None else np.ascontiguousarray(importance, np.float32)

    def part(start: int, stop: int) -> None:
        source = np.ascontiguousarray(rows[start:stop], np.float32)
        if not np.isfinite(source).all():
            raise BadRows("the values are not all finite")
        target = out[start:stop]
        written = lib.ggml_quantize_chunk(
            type_id,
            source.ctypes.data,
            target.ctypes.data,
            0,
            stop - start,
            columns,
            None if weights is None else weights.ctypes.data,
        )
        if written != target.nbytes:
            raise BadRows(f"ggml wrote {written} bytes where {target.nbytes} were expected")

    edges = np.linspace(0, count, min(count, threads * CHUNKS_PER_THREAD) + 1).astype(int)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(part, edges[:-1].tolist(), edges[1:].tolist()))
    return out.tobytes()
