"""What this machine is: cores that may be used, memory, how fast it reads memory and multiplies matrices, its GPUs."""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from acc.store import atomic

_CGROUP = Path("/sys/fs/cgroup")


@functools.cache
def processor() -> str:
    """The processor's name as the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", info.read_text("utf-8", "replace"), re.MULTILINE)
        if match:
            return " ".join(match[1].split())
    return platform.processor() or platform.machine()


def threads() -> int:
    """Threads worth computing with: the cores that this process may use, hyper-threads not counted twice."""
    import psutil

    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    count = len(affinity)
    quota = (_read(_CGROUP / "cpu.max") or "max").split()
    if quota[0] != "max":
        count = min(count, max(1, int(quota[0]) // int(quota[1])))
    physical = psutil.cpu_count(logical=False)
    return min(count, physical) if physical else count


def memory_bytes() -> int:
    """Memory that this process may use: what is installed, or its cgroup's limit."""
    import psutil

    total = int(psutil.virtual_memory().total)
    limit = _read(_CGROUP / "memory.max") or "max"
    return total if limit == "max" else min(total, int(limit))


def speeds(cache: Path) -> tuple[float, float]:
    """Bytes per second that memory is read with, and float32 FLOP/s of a matrix product, by all threads.

    Measured once (about a second) and kept in `cache`, so that everything computed from it stays the same.
    """
    key = f"{processor()} x {threads()}"
    known = _known(cache)
    if key not in known:
        known[key] = [_read_speed(threads()), _product_speed()]
        cache.parent.mkdir(parents=True, exist_ok=True)
        with atomic(cache) as temporary:
            temporary.write_text(json.dumps(known), "utf-8")
    return known[key][0], known[key][1]


@functools.cache
def gpus() -> tuple[str, ...]:
    """Names of the NVIDIA GPUs that the driver shows; empty without driver or nvidia-ml-py."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return tuple(str(pynvml.nvmlDeviceGetName(handle)) for handle in handles)
    except Exception:  # the binding raises errors of its own for every kind of absence
        return ()


def _read_speed(count: int) -> float:
    """Bytes per second of reading arrays that do not fit into caches, one per thread, best of some rounds."""
    import numpy as np

    blocks = [np.ones(2**25, dtype=np.float32) for _ in range(count)]  # 128 MiB each
    with ThreadPoolExecutor(count) as pool:
        best = _best(lambda: list(pool.map(np.max, blocks)), rounds=4)
    return sum(block.nbytes for block in blocks) / best


def _product_speed(size: int = 1024) -> float:
    import numpy as np

    left = np.ones((size, size), dtype=np.float32)
    return 2 * size**3 / _best(lambda: left @ left, rounds=8)


def _best(work: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def _known(cache: Path) -> dict[str, list[float]]:
    try:
        return dict(json.loads(cache.read_text("utf-8")))
    except (OSError, ValueError):
        return {}


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8").strip()
    except OSError:
        return ""
