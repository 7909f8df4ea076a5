"""From a (cut) Hugging Face folder to a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from acc.backend_api import LoweringPlan
from acc.backends.llamacpp.plan import lowering_plan
from acc.backends.llamacpp.slots import Slot, Values
from acc.backends.llamacpp.vocab import has_tokenizer
from acc.backends.llamacpp.writer import Importance, draft
from acc.diag import AccError, Diagnostic
from acc.ir import ModelIR, Tensor

if TYPE_CHECKING:
    import torch

    from acc.passes_api import Context


def lower(ir: ModelIR, weights: Path, quant: str, out: Path, ctx: Context, moments: Path | None = None) -> LoweringPlan:
    """Write the GGUF file `out`.

    Args:
        weights: a Hugging Face folder already cut to `ir.arch`.
        moments: folder of second moments; their diagonals weigh the columns when a matrix is quantised (what llama.cpp
            calls an imatrix: the mean square of each input).

    Raises:
        AccError: LC001 or LC002 if no host holds the shape, LC03x for the tokenizer, ACC10x for the folder, ACC14x for
            the disk.
    """
    from acc.checkpoint import Checkpoint

    checkpoint = Checkpoint.at(weights)
    tokenizer = weights if has_tokenizer(weights) else None
    made = draft(ir, quant, tokenizer)

    def read(name: str) -> Values:
        return as_float32(checkpoint.read(name))

    try:
        made.write(out, read, importance(ir, made.choice.held, moments), ctx.progress)
    except OSError as error:
        raise AccError.of("LC034", str(out), f"the file cannot be written ({error.strerror or error})") from error
    notes: tuple[Diagnostic, ...] = ()
    if tokenizer is None:
        text = "the folder has no tokenizer.json: the file holds no tokenizer, only token ids can be served"
        notes = (Diagnostic("LC033", str(weights), text, "add tokenizer.json to the model's folder", "warning"),)
    result = lowering_plan(made, notes)
    if out.stat().st_size != result.file_bytes:
        raise RuntimeError(f"{out} has {out.stat().st_size} bytes, the plan says {result.file_bytes}")
    return result


def as_float32(tensor: torch.Tensor) -> Values:
    """A tensor's values as float32."""
    values: Values = tensor.float().numpy()
    return values


def importance(ir: ModelIR, held: ModelIR, moments: Path | None) -> Importance:
    """Column weights per slot from the diagonals in `moments`, cut to the Arch and padded like the matrices."""
    if moments is None:
        return lambda slot: None
    from safetensors.numpy import load_file

    diagonals: Mapping[str, Values] = {
        key.removeprefix("diag/"): value
        for key, value in load_file(moments / "moments.safetensors").items()
        if key.startswith("diag/")
    }

    def of(slot: Slot) -> Values | None:
        if len(slot.shape) < 2 or slot.empty or not slot.sources:
            return None
        if slot.name == "token_embd.weight" and slot.kind != "output":
            return None  # rows are looked up, nothing is multiplied with them
        tensor = slot.sources[0].tensor
        value = next((diagonals[name] for name in _names(tensor) if name in diagonals), None)
        return None if value is None else _fitted(value, tensor, ir, held)

    return of


def _names(tensor: Tensor) -> tuple[str, ...]:
    return (*tensor.aliases, tensor.name)


def _fitted(value: Values, tensor: Tensor, ir: ModelIR, held: ModelIR) -> Values | None:
    """A parent's diagonal cut to the Arch, its mean in padded places (they hold zeros); None if it fits neither."""
    from acc.backends.llamacpp.slots import places

    axis = tensor.axes[-1]
    if value.size != ir.axis_size(axis):
        indices = ir.axis_indices(axis)
        if not indices or indices[-1] >= value.size:
            return None
        value = value[indices]
    if not np.isfinite(value).all() or not value.any():
        return None
    fitted = np.full(held.axis_size(axis), float(value.mean()), np.float32)
    fitted[places(axis, ir, held)] = value
    return fitted
