"""What this machine's processor really grants, as llama.cpp's build flags and its self-description name it."""

from __future__ import annotations

import ctypes
import platform
import re
from functools import cache
from pathlib import Path

_FLAGS = {
    "GGML_SSE42": ("sse4_2",),
    "GGML_AVX": ("avx",),
    "GGML_AVX2": ("avx2",),
    "GGML_FMA": ("fma",),
    "GGML_F16C": ("f16c",),
    "GGML_BMI2": ("bmi2",),
    "GGML_AVX_VNNI": ("avx_vnni",),
    "GGML_AVX512": ("avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"),
    "GGML_AVX512_VBMI": ("avx512vbmi",),
    "GGML_AVX512_VNNI": ("avx512_vnni",),
    "GGML_AVX512_BF16": ("avx512_bf16",),
}
"""CMake options of ggml for x86, and what /proc/cpuinfo calls the instructions that each one uses."""

_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _TILE_DATA = 158, 0x1023, 18
"""Linux on x86-64 grants the AMX tile registers to a process only when it asks (kernel documentation, x86/xstate)."""


@cache
def features() -> frozenset[str]:
    """The processor's instruction sets that the system shows, in the names of /proc/cpuinfo; empty if it shows none."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        return frozenset()
    match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    return frozenset(match[1].split()) if match else frozenset()


@cache
def amx_granted() -> bool:
    """Whether this process may use the AMX tile registers. Virtual machines often announce AMX and do not grant it."""
    if platform.system() != "Linux" or platform.machine() != "x86_64" or "amx_tile" not in features():
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _TILE_DATA)) == 0


def cmake_flags() -> list[str]:
    """How ggml is built for this processor.

    On x86 under Linux every instruction set is named, from what the system shows: `GGML_NATIVE` would ask the
    processor itself and take AMX where it is announced and not granted. Elsewhere `GGML_NATIVE` is right.
    """
    shown = features()
    if platform.machine() not in ("x86_64", "AMD64") or not shown:
        return ["-DGGML_NATIVE=ON"]
    chosen = [f"-D{flag}={'ON' if shown.issuperset(needs) else 'OFF'}" for flag, needs in _FLAGS.items()]
    return ["-DGGML_NATIVE=OFF", *chosen]


def unusable(build: str) -> list[str]:
    """Instruction sets that `llama_print_system_info` names and this machine does not grant."""
    shown, built = features(), _built(build)
    if not shown:
        return []
    found = [name for name, needs in _named() if name in built and not shown.issuperset(needs)]
    return found + (["AMX_INT8"] if "AMX_INT8" in built and not amx_granted() else [])


def lacking(build: str) -> list[str]:
    """Instruction sets of this machine that a library was not built for."""
    shown, built = features(), _built(build)
    return [name for name, needs in _named() if name not in built and shown.issuperset(needs)]


def _named() -> list[tuple[str, tuple[str, ...]]]:
    """The sets as `llama_print_system_info` calls them; it does not tell of SSE 4.2."""
    return [(flag.removeprefix("GGML_"), needs) for flag, needs in _FLAGS.items() if flag != "GGML_SSE42"]


def _built(build: str) -> set[str]:
    return {name for name, value in re.findall(r"(\w+) = (\d+)", build) if value != "0"}
