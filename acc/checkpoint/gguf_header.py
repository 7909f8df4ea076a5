"""The header of a GGUF file, read with every count, length and offset checked against the file before it is used.

GGUF headers are untrusted input: a count of 2^60 must be a diagnostic, never an allocation. Layout: the GGUF
specification (ggml/docs/gguf.md), versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from acc.diag import AccError

MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_NAME, _MAX_TENSORS, _MAX_KEYS, _MAX_ITEMS, _MAX_DIMS = 1 << 10, 1 << 17, 1 << 14, 1 << 24, 4


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of the file: `shape` in PyTorch's order, `type` as ggml names it, `start` and `bytes` in the file."""

    name: str
    shape: tuple[int, ...]
    type: str
    start: int
    bytes: int

    @property
    def rows(self) -> int:
        """How many runs of the last dimension it has."""
        return math.prod(self.shape[:-1])


@dataclass(frozen=True)
class Header:
    """What a GGUF file says before its weights.

    Attributes:
        metadata: scalars and lists, by key.
        types: the GGUF value type of each key (of the items, for a list), so that it can be written again as it was.
    """

    path: Path
    metadata: Mapping[str, Any]
    types: Mapping[str, int]
    tensors: Mapping[str, TensorInfo]

    @property
    def architecture(self) -> str:
        """The engine's name of the architecture, such as `llama`."""
        return str(self.metadata["general.architecture"])

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `{architecture}.{key}`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def number(self, key: str) -> float | None:
        """The value of `{architecture}.{key}`, which must be a number; None if it is not there."""
        value = self.get(key)
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
            raise contradiction(self, f"`{self.architecture}.{key}` is not a number")
        return value

    def tensor(self, name: str) -> TensorInfo:
        """A tensor that must be there."""
        if name not in self.tensors:
            raise contradiction(self, f"the tensor `{name}` is missing")
        return self.tensors[name]


def contradiction(header: Header, what: str) -> AccError:
    """The refusal of a well-formed file whose parts do not fit together."""
    told = f"the GGUF file contradicts itself: {what}."
    return AccError.of("ACC124", str(header.path), told, "download the file again, or convert the model again")


def read_header(path: Path) -> Header:
    """Read and check a header.

    Raises:
        AccError: ACC120 if it is not a GGUF file of a known version, ACC121 if its header is impossible.
    """
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) < 24:
                _corrupt(path, "the file is shorter than a GGUF header")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).header()
    except OSError as error:
        raise AccError.of("ACC100", str(path), f"the file cannot be read: {error.strerror}.") from error


def _corrupt(path: Path, what: str) -> NoReturn:
    raise AccError.of(
        "ACC121", str(path), f"the GGUF header is corrupt: {what}.", "download the file again and compare its checksum"
    )


@dataclass
class _Reader:
    path: Path
    data: mmap.mmap
    at: int = 4
    metadata: dict[str, Any] = field(default_factory=dict)
    types: dict[str, int] = field(default_factory=dict)

    def header(self) -> Header:
        if self.data[:4] != MAGIC:
            raise AccError.of("ACC120", str(self.path), "this is not a GGUF file.", "give a folder or a .gguf file")
        version = self.scalar("I")
        if version not in (2, 3):
            raise AccError.of(
                "ACC120",
                str(self.path),
                f"GGUF version {version} is not supported (only 2 and 3, little-endian).",
                "convert the model again with a current llama.cpp",
            )
        tensors, keys = self.scalar("Q"), self.scalar("Q")
        # The smallest tensor entry takes 33 bytes, the smallest key 13.
        self.bound(tensors, _MAX_TENSORS, 33, "tensors")
        self.bound(keys, _MAX_KEYS, 13, "metadata keys")
        for _ in range(keys):
            key = self.text(_MAX_NAME, "a metadata key")
            if key in self.metadata:
                self.fail(f"the key `{key}` appears twice")
            self.metadata[key] = self.value(key)
        if not isinstance(self.metadata.get("general.architecture"), str):
            self.fail("`general.architecture` is missing")
        infos = [self.tensor() for _ in range(tensors)]
        return Header(self.path, self.metadata, self.types, dict(self.placed(infos)))

    def fail(self, what: str) -> NoReturn:
        _corrupt(self.path, what)

    def bound(self, count: int, limit: int, item_bytes: int, what: str) -> None:
        """Refuse a count that is over the limit or whose items could not fit in the rest of the file."""
        left = len(self.data) - self.at
        if count > limit or count * item_bytes > left:
            self.fail(f"{count} {what} are claimed at byte {self.at}, with {left} bytes left and {limit} allowed")

    def scalar(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        self.bound(1, 1, size, "values")
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += size
        return value

    def text(self, limit: int, what: str) -> str:
        length = self.scalar("Q")
        self.bound(length, limit, 1, f"bytes of {what}")
        raw = self.data[self.at : self.at + length]
        self.at += length
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.fail(f"{what} at byte {self.at - length} is not UTF-8")

    def value(self, key: str) -> Any:
        kind = self.scalar("I")
        if kind != _ARRAY:
            self.types[key] = kind
            return self.item(kind, key)
        item = self.scalar("I")
        count = self.scalar("Q")
        if item != _STRING and item not in _SCALARS:
            self.fail(f"`{key}` is a list of the unknown type {item}")
        self.types[key] = item
        if item == _STRING:
            self.bound(count, _MAX_ITEMS, 8, f"items of `{key}`")
            return [self.text(_MAX_ITEMS, f"`{key}`") for _ in range(count)]
        code = f"<{count}{_SCALARS[item]}" if count <= _MAX_ITEMS else ""
        self.bound(count, _MAX_ITEMS, struct.calcsize("<" + _SCALARS[item]), f"items of `{key}`")
        values = list(struct.unpack_from(code, self.data, self.at))
        self.at += struct.calcsize(code)
        return values

    def item(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.text(_MAX_ITEMS, f"`{key}`")
        if kind not in _SCALARS:
            self.fail(f"`{key}` has the unknown type {kind}")
        return self.scalar(_SCALARS[kind])

    def tensor(self) -> TensorInfo:
        """One entry of the tensor table; `start` is still relative to the data section."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self.text(_MAX_NAME, "a tensor name")
        dims = self.scalar("I")
        if not 1 <= dims <= _MAX_DIMS:
            self.fail(f"tensor `{name}` has {dims} dimensions")
        shape = tuple(self.scalar("Q") for _ in range(dims))[::-1]
        kind, start = self.scalar("I"), self.scalar("Q")
        try:
            kind = GGMLQuantizationType(kind)
        except ValueError:
            self.fail(f"tensor `{name}` has the unknown type {kind}")
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if 0 in shape or shape[-1] % block:
            self.fail(f"tensor `{name}` of shape {list(shape)} cannot be stored as {kind.name}")
        return TensorInfo(name, shape, kind.name, start, math.prod(shape) // block * block_bytes)

    def placed(self, infos: list[TensorInfo]) -> Iterator[tuple[str, TensorInfo]]:
        """The tensors with their place in the file, once it is sure that they lie inside it, apart from each other."""
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 16 or alignment & (alignment - 1):
            self.fail(f"the alignment {alignment!r} is not a power of two up to 65536")
        base = -(-self.at // alignment) * alignment
        seen: set[str] = set()
        end = base
        for info in sorted(infos, key=lambda info: info.start):
            start = base + info.start
            if info.name in seen:
                self.fail(f"tensor `{info.name}` appears twice")
            if start < end or start + info.bytes > len(self.data):
                self.fail(
                    f"tensor `{info.name}` ({info.type}, shape {list(info.shape)}) would lie in bytes {start} to "
                    f"{start + info.bytes} of {len(self.data)}, where it does not fit"
                )
            seen.add(info.name)
            end = start + info.bytes
            yield info.name, TensorInfo(info.name, info.shape, info.type, start, info.bytes)
