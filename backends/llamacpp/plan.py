"""What a lowering would write, known before any compute, and the sizes that the engine likes."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

from acc.backend_api import Check, Grid, LoweringPlan, TensorPlan
from acc.backends.llamacpp import types
from acc.backends.llamacpp.hosts import FAMILIES, HOSTS, Choice, choose
from acc.backends.llamacpp.slots import Slot
from acc.backends.llamacpp.vocab import has_tokenizer
from acc.backends.llamacpp.writer import Draft, draft
from acc.diag import Diagnostic
from acc.ir import ModelIR, Role
from acc.target import Target

ROWS = 32
"""Rows of a matrix come in multiples of this on the fast paths (CPU repacking takes 8, CUDA tiles more)."""


def plan(ir: ModelIR, quant: str) -> LoweringPlan:
    """What `lower` would write for `ir.arch`, to the byte.

    The tokenizer is part of the file; it is taken from the parent's folder.
    """
    folder = _parent(ir)
    notes: tuple[Diagnostic, ...] = ()
    if folder is None:
        text = "no tokenizer was found beside the model: the file will hold none, and only token ids can be served"
        notes = (Diagnostic("LC033", ir.family, text, "add tokenizer.json to the model's folder", "warning"),)
    return lowering_plan(draft(ir, quant, folder), notes)


def lowering_plan(made: Draft, notes: tuple[Diagnostic, ...] = ()) -> LoweringPlan:
    """The plan of a draft, with a finding about its fallbacks."""
    found = (*made.choice.notes, *notes, *fallback_notes(made))
    return LoweringPlan(made.choice.host.arch, made.tensors, made.file_bytes(), found)


def check(ir: ModelIR, target: Target) -> Check:
    """What would convert for this target, what would fall back, and the grid of the fast path; needs no weights."""
    choice = choose(ir, types.mix(target.quant).block)
    if any(note.level == "error" for note in choice.notes):
        return Check(choice.notes, {}, "")
    return Check(plan(ir, target.quant).notes, grid(ir, target.quant, choice), choice.host.arch)


# Fallbacks -----------------------------------------------------------------------------------------------------------


def fallback_notes(made: Draft) -> tuple[Diagnostic, ...]:
    """One warning that counts the tensors whose columns do not fit their type, and names the dims that are to blame."""
    pairs = [(s, t) for s, t in zip(made.slots, made.tensors, strict=True) if t.type != t.wanted]
    if not pairs:
        return ()
    causes = Counter(_cause(made, slot) for slot, _ in pairs)
    told = " and ".join(
        f"{cause} ({count} tensors)" if len(causes) > 1 else cause for cause, count in causes.most_common(3)
    )
    block = max(types.block(tensor.wanted)[0] for _, tensor in pairs)
    are = "are not multiples" if len(causes) > 1 else "is not a multiple"
    more = f" and {len(causes) - 3} more sizes" if len(causes) > 3 else ""
    text = (
        f"{len(pairs)} of {len(made.tensors)} tensors fall back at {made.quant.upper()}"
        f" because {told}{more} {are} of {block}: {_bits(made.tensors, 'type')} bits per weight"
        f" instead of {_bits(made.tensors, 'wanted')}"
    )
    hint = f"cut these dims to multiples of {block}, or take a format of 32-column blocks such as q8_0 or q4_0"
    return (Diagnostic("LC010", made.quant, text, hint, "warning"),)


def _bits(tensors: tuple[TensorPlan, ...], which: str) -> str:
    weights = sum(math.prod(tensor.shape) for tensor in tensors)
    bits = 0.0
    for tensor in tensors:
        count, size = types.block(getattr(tensor, which))
        bits += 8 * math.prod(tensor.shape) * size / count
    return f"{bits / weights:.2f}"


def _cause(made: Draft, slot: Slot) -> str:
    """The dims of a slot's columns, with their size: `hidden 576`, `ffn 700`."""
    held = made.choice.held
    roles = [held.dims[name].role for segment in slot.sources[0].tensor.axes[-1] for name in segment]
    name = "heads x head_dim" if "kv_group" in roles else roles[0] if roles else slot.kind
    return f"{name} {slot.columns}"


# Grid ----------------------------------------------------------------------------------------------------------------


def grid(ir: ModelIR, quant: str, choice: Choice) -> dict[Role, Grid]:
    """The sizes per role that keep every tensor in the type that the format wants."""
    block = max(types.mix(quant).block, 32)
    family = FAMILIES[ir.family]
    uneven = HOSTS.get(family.uneven)
    alike = uneven is None or (not uneven.untied and not ir.model_shape().tied)
    columns = f"{quant.upper()} stores rows in blocks of {block}"
    one = f"; `{family.own}` has one size for all layers" if alike else ""
    return {
        "hidden": Grid("hidden", block, block, why=columns),
        "ffn": Grid("ffn", block, block, alike, columns + one),
        "kv_group": Grid("kv_group", _head_step(ir, block), 1, alike, f"heads x head_dim are columns: {columns}{one}"),
        "q_per_kv": Grid("q_per_kv", 1, 1, alike, f"queries per group are an integer{one}"),
        "head_dim": Grid("head_dim", ir.head_dim(), ir.head_dim(), True, "llama.cpp has one head size, of few kernels"),
        "vocab": Grid("vocab", ROWS, ROWS, why="rows of the output matrix"),
        "attn": Grid("attn", 1, 1 if alike else 0, alike, one.lstrip("; ")),
        "mlp": Grid("mlp", 1, 1 if alike else 0, alike, one.lstrip("; ")),
    }


def _head_step(ir: ModelIR, block: int) -> int:
    """KV groups in steps that keep heads x head_dim a multiple of the block; 1 where the parent itself cannot."""
    queries = max((dim.size for dim in ir.select("q_per_kv")), default=1)
    step = block // math.gcd(block, queries * ir.head_dim())
    groups = max((dim.size for dim in ir.select("kv_group")), default=1)
    return step if step <= groups else 1


def _parent(ir: ModelIR) -> Path | None:
    for kind in ("parent", "weights"):
        artifact = ir.artifacts.get(kind)
        if artifact and Path(artifact.path).is_absolute() and has_tokenizer(Path(artifact.path)):
            return Path(artifact.path)
    return None
