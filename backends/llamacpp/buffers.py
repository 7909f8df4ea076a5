"""What the engine says in its log about the memory that it takes, and what of it is needed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from acc.checkpoint.gguf_header import TensorInfo

MIB = 1024 * 1024

_KINDS = {
    "model": re.compile(r"(\S+) model buffer size\s*=\s*([\d.]+) MiB"),
    "kv": re.compile(r"(\S+) (?:KV|RS) buffer size\s*=\s*([\d.]+) MiB"),
    "compute": re.compile(r"(\S+) compute buffer size\s*=\s*([\d.]+) MiB"),
    "output": re.compile(r"(\S+)\s+output buffer size\s*=\s*([\d.]+) MiB"),
}


def buffers(lines: Iterable[str]) -> dict[str, int]:
    """Bytes by buffer from the log of one load: `<kind>.<device>`, kind one of model, kv, compute, output.

    The log rounds to 0.01 MiB, which is the resolution of these numbers.
    """
    found: dict[str, int] = {}
    for line in lines:
        for kind, pattern in _KINDS.items():
            match = pattern.search(line)
            if match:
                key = f"{kind}.{match.group(1)}"
                found[key] = found.get(key, 0) + round(float(match.group(2)) * MIB)
    return found


def flash_attention(lines: Iterable[str]) -> str:
    """What the engine decided on flash attention: `on`, `off` or `unknown`."""
    decided = "unknown"
    for line in lines:
        match = re.search(r"flash_attn\s*=\s*(\w+)", line) or re.search(
            r"Flash Attention\b.*?(enabled|disabled|not supported)", line
        )
        if match:
            told = {"enabled": "on", "1": "on", "disabled": "off", "0": "off", "not supported": "off"}
            decided = told.get(match.group(1), decided)
    return decided


def total(found: Mapping[str, int], kind: str) -> int:
    """Bytes of one kind on all devices."""
    return sum(size for name, size in found.items() if name.startswith(f"{kind}."))


def mapped(found: Mapping[str, int]) -> int:
    """Bytes of the model file that the engine keeps mapped."""
    return sum(size for name, size in found.items() if name.startswith("model.") and "Mapped" in name)


def rearranged(found: Mapping[str, int]) -> int:
    """Bytes of weights that the CPU computes from in an order of its own (repack.cpp)."""
    return sum(size for name, size in found.items() if name.startswith("model.") and "REPACK" in name)


def second_embedding(tensors: Iterable[TensorInfo], found: Mapping[str, int]) -> int:
    """Bytes by which the loaded weights exceed the file: a tied embedding that is kept twice.

    Where one tensor serves as embedding and as output, the engine reads rows of it from the mapped file and computes
    the output from a second copy if it rearranges that type or has the output layer on a GPU. The log gives only
    totals, so the copy is recognised by the sum: the rearranged bytes are those of all matrices of some types.
    """
    table = {tensor.name: tensor for tensor in tensors}
    embedding = table.get("token_embd.weight")
    if embedding is None or "output.weight" in table:
        return 0
    if any(name.startswith("model.") and not name.startswith("model.CPU") for name in found):
        return embedding.bytes  # the default puts all layers there, the output included
    copied = rearranged(found)
    groups: dict[tuple[str, bool], int] = {}
    for tensor in table.values():
        if tensor.name.startswith("blk.") and len(tensor.shape) > 1:
            key = (tensor.type, tensor.shape[0] % 8 == 0)
            groups[key] = groups.get(key, 0) + tensor.bytes
    groups.setdefault((embedding.type, embedding.shape[0] % 8 == 0), 0)
    slack = MIB // 50 + 64 * len(table)  # the log's rounding, and alignment
    for count in range(1, len(groups) + 1):
        for chosen in itertools.combinations(groups, count):
            alike = (embedding.type, embedding.shape[0] % 8 == 0) in chosen
            if alike and abs(sum(groups[key] for key in chosen) + embedding.bytes - copied) <= slack:
                return embedding.bytes
    return 0
