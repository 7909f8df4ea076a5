"""What the engine says in its log about the memory that it takes."""

from __future__ import annotations

import re
from collections.abc import Iterable

MIB = 1024 * 1024

_MODEL = re.compile(r"(\S+) model buffer size\s*=\s*([\d.]+) MiB")
_CACHE = re.compile(r"(\S+) (?:KV|RS) buffer size\s*=\s*([\d.]+) MiB")
_COMPUTE = re.compile(r"(\S+) compute buffer size\s*=\s*([\d.]+) MiB")
_OUTPUT = re.compile(r"(\S+)\s+output buffer size\s*=\s*([\d.]+) MiB")


def buffers(lines: Iterable[str]) -> dict[str, int]:
    """Bytes by buffer from the log of one load: `<kind>.<device>`, kind one of model, kv, compute, output.

    The log rounds to 0.01 MiB, which is the resolution of these numbers.
    """
    found: dict[str, int] = {}
    for line in lines:
        for kind, pattern in (("model", _MODEL), ("kv", _CACHE), ("compute", _COMPUTE), ("output", _OUTPUT)):
            match = pattern.search(line)
            if match:
                key = f"{kind}.{match.group(1)}"
                found[key] = found.get(key, 0) + round(float(match.group(2)) * MIB)
    return found


def flash_attention(lines: Iterable[str]) -> str:
    """What the engine decided on flash attention: `on`, `off` or `unknown`."""
    decided = "unknown"
    for line in lines:
        match = re.search(r"flash_attn\s*=\s*(\w+)", line) or re.search(r"Flash Attention.*\b(enabled|disabled)", line)
        if match:
            decided = {"enabled": "on", "1": "on", "disabled": "off", "0": "off"}.get(match.group(1), decided)
    return decided
