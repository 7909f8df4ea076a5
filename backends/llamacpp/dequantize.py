"""Back from a GGUF file to a Hugging Face folder that holds exactly the stored values, for parity checks in PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from acc.backends.llamacpp import types
from acc.backends.llamacpp.hosts import choose
from acc.backends.llamacpp.slots import Slot, Source, Values, scatter, slots
from acc.diag import AccError
from acc.ir import ModelIR

if TYPE_CHECKING:
    import gguf
    import torch


def dequantized(artifact: Path, weights: Path, out: Path, ir: ModelIR) -> None:
    """Write the folder `out`: the config and tokenizer of `weights`, the values of `artifact`, in float32.

    Args:
        artifact: a GGUF file that `lower` wrote for `ir.arch`.
        weights: the folder it was written from.

    Raises:
        AccError: LC035 if the file cannot be read or does not hold the tensors that it should.
    """
    from acc.checkpoint import Checkpoint, write

    found, tensors, held = read_file(artifact, ir)
    config: dict[str, Any] = {**Checkpoint.at(weights).config_json, "dtype": "float32"}
    if "output.weight" in tensors:
        config["tie_word_embeddings"] = False
    write(out, config, _restored(found, tensors, ir, held), like=weights)


def read_file(artifact: Path, ir: ModelIR) -> tuple[list[Slot], Mapping[str, gguf.ReaderTensor], ModelIR]:
    """The slots of a file that `lower` wrote for `ir.arch`, its tensors by name, and the padded model that it holds.

    Raises:
        AccError: LC035 if the file cannot be read or does not hold the tensors that it should.
    """
    reader = _open(artifact)
    choice = choose(ir, types.mix(_format(reader, artifact)).block).require()
    found = slots(ir, choice)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    _require_same(artifact, found, tensors)
    return found, tensors, choice.held


def _restored(
    found: list[Slot], tensors: Mapping[str, gguf.ReaderTensor], ir: ModelIR, held: ModelIR
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the checkpoint, from the slots that hold it; segments wait until their tensor is whole."""
    import torch

    waiting: dict[str, dict[int, Values]] = {}
    for slot in found:
        if slot.values or slot.empty:
            continue
        stored = tensors[slot.name]
        for source, value in scatter(slot, _values(stored).reshape(slot.shape), ir, held):
            if source.segment is not None:
                segments = waiting.setdefault(source.stored, {})
                segments[source.segment] = value
                if len(segments) < len(source.tensor.axes[0]):
                    continue
                value = np.concatenate([segments[index] for index in sorted(segments)])
                del waiting[source.stored]
            yield _name(slot, source), torch.from_numpy(np.ascontiguousarray(value))


def _values(stored: gguf.ReaderTensor) -> Values:
    import gguf

    values: Values = gguf.quants.dequantize(stored.data, stored.tensor_type).astype(np.float32, copy=False)
    return values


def _name(slot: Slot, source: Source) -> str:
    """Where a slot's values go: an output matrix that was split off a tied embedding goes to the tied name."""
    if slot.name == "output.weight" and source.tensor.aliases:
        return next(name for name in (source.tensor.name, *source.tensor.aliases) if name != source.stored)
    return source.stored


def _open(artifact: Path) -> gguf.GGUFReader:
    import gguf

    try:
        return gguf.GGUFReader(artifact)
    except Exception as error:  # the reader raises whatever a broken header leads to
        raise _unreadable(artifact, f"is no readable GGUF file ({error})") from error


def _format(reader: gguf.GGUFReader, artifact: Path) -> str:
    """The number format that the file names."""
    field = reader.get_field("general.file_type")
    number = int(field.contents()) if field else -1
    for name, mix in types.MIXES.items():
        if mix.file_type == number:
            return name
    raise _unreadable(artifact, f"has a file type {number} that acc does not write")


def _require_same(artifact: Path, found: list[Slot], tensors: Mapping[str, gguf.ReaderTensor]) -> None:
    for slot in found:
        stored = tensors.get(slot.name)
        shape = tuple(int(size) for size in reversed(stored.shape)) if stored is not None else None
        if shape != slot.shape:
            raise _unreadable(artifact, f"holds {slot.name} as {shape}, the architecture says {slot.shape}")


def _unreadable(artifact: Path, what: str) -> AccError:
    return AccError.of("LC035", str(artifact), what, "lower the model again")
