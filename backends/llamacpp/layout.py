"""Parameter structs of libllama, read by what their defaults look like and not by one version's header.

`llama_model_params` and `llama_context_params` are passed by value and change from version to version (fields are
inserted in the middle). Here they are opaque blocks that are larger than any of them: a struct of more than 16 bytes
is returned through a hidden pointer and passed in memory, so the library reads and writes only its own part. The
library fills in its defaults, and the few fields that acc sets are found from those defaults (512, 2048, 512, 1 ...;
four -1 in a row; two F16 cache types). A field that is not found has no offset, and setting it is refused.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from dataclasses import dataclass

BLOCK_WORDS = 128
"""Size of an opaque block in 8-byte words; the largest known struct takes 21."""

SCAN_BYTES = 256


class Block(ctypes.Structure):
    """Room for a parameter struct of any version."""

    _fields_ = [("words", ctypes.c_uint64 * BLOCK_WORDS)]


class UnknownLayout(Exception):
    """The defaults of this library look like no struct that acc knows; the text says which field is missing."""


@dataclass(frozen=True)
class Fields:
    """Where the fields of one struct lie: name -> (offset in bytes, format of `struct`)."""

    struct: str
    at: Mapping[str, tuple[int, str]]

    def set(self, block: Block, **values: int | bool) -> None:
        """Write values into the block.

        Raises:
            UnknownLayout: a field was not found in this version's struct.
        """
        for name, value in values.items():
            if name not in self.at:
                raise UnknownLayout(f"{self.struct} has no field `{name}` where acc looks for it")
            offset, form = self.at[name]
            struct.pack_into(form, block, offset, value)

    def get(self, block: Block, name: str) -> int:
        """Read one field."""
        offset, form = self.at[name]
        return int(struct.unpack_from(form, block, offset)[0])


def model_fields(defaults: Block) -> Fields:
    """The fields of `llama_model_params` that acc may set: only `n_gpu_layers`.

    The struct starts with two null pointers, then the number of layers on the GPU (all, or 0 in older versions) and
    the split mode (1: by layer).
    """
    devices, overrides, gpu_layers, split = struct.unpack_from("=qqii", bytes(defaults))
    if devices or overrides or split != 1 or gpu_layers not in (-1, 0, 999):
        raise UnknownLayout(
            f"llama_model_params starts with {devices, overrides, gpu_layers, split}, not with (0, 0, n_gpu_layers, 1)"
        )
    return Fields("llama_model_params", {"n_gpu_layers": (16, "=i")})


def context_fields(defaults: Block) -> Fields:
    """The fields of `llama_context_params` that acc may set, found from the defaults.

    Always there: `n_ctx`, `n_batch`, `n_ubatch`, `n_seq_max`. Where they can be recognised:
    `flash_attn`, `type_k`, `type_v`.

    Raises:
        UnknownLayout: the struct does not start with (512, 2048, 512, 1).
    """
    raw = bytes(defaults)[:SCAN_BYTES]
    words = struct.unpack(f"={len(raw) // 4}i", raw)
    if words[:4] != (512, 2048, 512, 1):
        raise UnknownLayout(f"llama_context_params starts with {words[:4]}, not with (512, 2048, 512, 1)")
    at = {name: (4 * i, "=I") for i, name in enumerate(("n_ctx", "n_batch", "n_ubatch", "n_seq_max"))}

    # rope scaling, pooling, attention and flash attention default to -1 (unspecified, auto), then two floats 0.
    enums = _find(words, (-1, -1, -1, -1, 0, 0), start=4)
    if enums is None:
        return Fields("llama_context_params", at)
    at["flash_attn"] = (4 * (enums + 3), "=i")

    # cb_eval and its data are null, then the two cache types, F16 = 1.
    types = _find(words, (0, 0, 0, 0, 1, 1), start=enums + 4)
    if types is None:
        return Fields("llama_context_params", at)
    at |= {"type_k": (4 * (types + 4), "=i"), "type_v": (4 * (types + 5), "=i")}
    return Fields("llama_context_params", at)


def _find(words: tuple[int, ...], pattern: tuple[int, ...], start: int) -> int | None:
    """Index of the first place at or after `start` where the pattern stands, or None."""
    places = range(start, len(words) - len(pattern) + 1)
    return next((i for i in places if words[i : i + len(pattern)] == pattern), None)
