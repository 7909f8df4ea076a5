"""Writing a Hugging Face folder tensor by tensor: sharded safetensors, all or nothing.

The safetensors library wants all tensors of a file at once; here the data of a shard is streamed behind a header of
reserved size, which the format allows (its JSON may end in spaces), so that memory holds one tensor.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from acc.diag import AccError
from acc.store import writing

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 2 << 30
_HEADER_BYTES = 128 << 10
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
GGUF_TOKENIZER = "gguf_tokenizer.json"
"""Side file of a folder made from a GGUF: every `tokenizer.*` key as it was; their GGUF types in `types`."""
CARRIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "chat_template.jinja",
    "chat_template.json",
    GGUF_TOKENIZER,
)
"""Files that belong to a model beside its config and weights."""


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name of a dtype, such as `BF16`."""
    return _DTYPES[str(dtype).removeprefix("torch.")]


def write(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, torch.Tensor]],
    like: Path | None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a Hugging Face folder, in the order of `tensors`, holding one tensor at a time.

    Args:
        folder: made anew; it must not hold anything yet.
        config: what becomes config.json.
        tensors: names as in the checkpoint; tied storage is to be given once.
        like: the folder whose tokenizer, chat template and generation files are copied, or None.
        shard_bytes: the largest shard; a bigger tensor gets a shard of its own.

    Raises:
        AccError: ACC502 for a full disk, ACC501 for a folder that cannot be written, ACC140 for one that is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise AccError.of("ACC140", str(folder), "it exists and is not empty.", "give a new or empty folder")
    with all_or_nothing(folder) as scratch:
        fill(scratch, config, tensors, shard_bytes)
        for name in CARRIED:
            if like is not None and (like / name).is_file():
                shutil.copyfile(like / name, scratch / name)


def fill(
    folder: Path, config: Mapping[str, Any], tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int = SHARD_BYTES
) -> None:
    """Write config.json and the shards into a folder that `all_or_nothing` guards."""
    _write_shards(folder, tensors, shard_bytes)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")


@contextmanager
def all_or_nothing(folder: Path) -> Iterator[Path]:
    """A scratch folder beside `folder` that takes its place at the end, or vanishes if anything fails."""
    scratch = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    try:
        with writing(folder, "write a model"):
            folder.parent.mkdir(parents=True, exist_ok=True)
            _sweep(folder)
            try:
                scratch.mkdir()
            except OSError as error:
                error.filename = str(folder)  # what the user knows
                raise
            yield scratch
            try:
                os.replace(scratch, folder)
            except OSError as error:
                # Another process made the same content-addressed folder first.
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove what a killed run left beside `folder` more than a day ago; a younger one may still be at work."""
    for left in folder.parent.glob(f".{folder.name}.*"):
        if time.time() - left.stat().st_mtime > 86_400:
            shutil.rmtree(left, ignore_errors=True)


class _Shard:
    """One safetensors file under way."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: BinaryIO = path.open("wb")
        self.file.seek(8 + _HEADER_BYTES)
        self.entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self.bytes = 0
        self.header_bytes = 64

    def takes(self, name: str, size: int, limit: int) -> bool:
        """Whether another tensor still fits; the first one always does."""
        fits = self.bytes + size <= limit and self.header_bytes + len(name) + 200 <= _HEADER_BYTES
        return fits or self.bytes == 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        import torch

        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        self.file.write(data.data)
        span = [self.bytes, self.bytes + data.nbytes]
        self.entries[name] = {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "data_offsets": span}
        self.bytes = span[1]
        self.header_bytes += len(json.dumps({name: self.entries[name]}))

    def close(self) -> None:
        header = json.dumps(self.entries, separators=(",", ":")).encode()
        self.file.seek(0)
        self.file.write(_HEADER_BYTES.to_bytes(8, "little") + header.ljust(_HEADER_BYTES))
        self.file.close()


def _write_shards(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], limit: int) -> None:
    shards: list[_Shard] = []
    try:
        for name, tensor in tensors:
            if not shards or not shards[-1].takes(name, tensor.nbytes, limit):
                if shards:
                    shards[-1].close()
                shards.append(_Shard(folder / f"shard-{len(shards)}"))
            shards[-1].add(name, tensor)
        if shards:
            shards[-1].close()
    finally:
        for shard in shards:
            shard.file.close()
    if len(shards) == 1:
        shards[0].path.rename(folder / "model.safetensors")
        return
    where: dict[str, str] = {}
    for index, shard in enumerate(shards):
        final = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        shard.path.rename(folder / final)
        where |= {name: final for name in shard.entries if name != "__metadata__"}
    index_json = {"metadata": {"total_size": sum(shard.bytes for shard in shards)}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_json, indent=2) + "\n", "utf-8")
