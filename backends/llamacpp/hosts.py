"""Which llama.cpp architecture holds which model: what the *engine* can load and compute, by family name.

Most architectures of llama.cpp read the sizes of layer 0 and use them for every layer; two that serve dense decoders,
`deci` and `openelm`, really are per layer. Whatever a host cannot hold is refused, or padded with zeros that change no
logit, and a note says what that costs. Every row of the tables below is run against PyTorch in
`tests/engine/test_parity.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from acc.diag import AccError, Diagnostic
from acc.ir import ModelIR, ModelShape


@dataclass(frozen=True)
class Host:
    """One architecture of llama.cpp.

    Attributes:
        arch: `general.architecture`.
        rope: `norm` rotates neighbouring rows, so that Transformers' half-split rows must be permuted; `neox` does not.
        per_layer: whether FFN width and heads may differ by layer.
        square: whether heads x head_dim must equal the hidden size.
        fused: kinds that it stores as one tensor, with what they are made of.
        packed: whether it stores fused qkv and gate-up matrices as the checkpoint has them.
        untied: whether it holds an output matrix of its own.
        no_attention: whether a layer (other than 0) may lack attention; an FFN can never be absent, see `deci`.
    """

    arch: str
    rope: Literal["norm", "neox"] = "neox"
    per_layer: bool = False
    square: bool = False
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    packed: bool = False
    untied: bool = True
    no_attention: bool = False


HOSTS: dict[str, Host] = {
    host.arch: host
    for host in (
        Host("llama", rope="norm"),
        # With attention but no FFN, deci computes the attention and throws it away (src/models/deci.cpp leaves out the
        # residual), so a dropped FFN stays, narrow, its down projection zero. Head sizes are read from layer 0 alone.
        Host("deci", rope="norm", per_layer=True, no_attention=True),
        Host("openelm", per_layer=True, fused={"attn_qkv": ("attn_q", "attn_k", "attn_v")}, untied=False),
        Host("qwen2", square=True),
        Host("qwen3"),
        Host("granite", rope="norm"),
        Host("smollm3", rope="norm"),
        Host("gemma3"),
        Host("phi3", square=True, packed=True),
    )
}

Condition = Callable[[Mapping[str, Any], ModelShape, Host], str]
"""A reason why a host cannot hold a model of that configuration and shape, or "" if it can."""


@dataclass(frozen=True)
class Family:
    """One family of Transformers (`model_type`).

    Attributes:
        own: the host that holds it when all layers are alike.
        uneven: the host that holds it when they are not, or "".
        conditions: what any host of it needs.
    """

    own: str
    uneven: str = ""
    conditions: tuple[Condition, ...] = ()


def _plain_rotary(config: Mapping[str, Any], shape: ModelShape, host: Host) -> str:
    part = rope(config).get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    return "only part of each head is rotated (partial_rotary_factor)" if part != 1.0 and host.arch != "phi3" else ""


def _known_rope(config: Mapping[str, Any], shape: ModelShape, host: Host) -> str:
    kind = rope(config).get("rope_type", "default")
    known = ("default",) if host.arch == "gemma3" else ("default", "linear", "llama3", "yarn")
    return "" if kind in known else f"rope scaling `{kind}` is not carried over"


def _silu(config: Mapping[str, Any], shape: ModelShape, host: Host) -> str:
    activation = config.get("hidden_act", "silu")
    return "" if activation in ("silu", "swish") else f"its activation is `{activation}`, the host computes SiLU"


def _untied(config: Mapping[str, Any], shape: ModelShape, host: Host) -> str:
    return "" if host.untied or shape.tied else "it holds tied embeddings only"


def _every_fourth_without_rope(config: Mapping[str, Any], shape: ModelShape, host: Host) -> str:
    rotated = [bool(flag) for flag in config.get("no_rope_layers") or ()]
    kept = [flag for flag, layer in zip(rotated, shape.layers, strict=False) if not layer.dropped]
    if kept == [bool((index + 1) % 4) for index in range(len(kept))]:
        return ""
    return "the engine leaves rope out in every fourth layer, counted in the file; these layers do not stand so"


def _every_sixth_global(config: Mapping[str, Any], shape: ModelShape, host: Host) -> str:
    kinds = config.get("layer_types") or ()
    kept = [kind for kind, layer in zip(kinds, shape.layers, strict=False) if not layer.dropped]
    if kept == ["sliding_attention" if (index + 1) % 6 else "full_attention" for index in range(len(kept))]:
        return ""
    return "the engine attends globally in every sixth layer, counted in the file; these layers do not stand so"


_COMMON: tuple[Condition, ...] = (_plain_rotary, _known_rope, _untied)
_SILU = (*_COMMON, _silu)

FAMILIES: dict[str, Family] = {
    "llama": Family("llama", "deci", _SILU),
    "mistral": Family("llama", "deci", _SILU),
    "qwen2": Family("qwen2", "deci", _SILU),
    "qwen3": Family("qwen3", "openelm", _SILU),
    "granite": Family("granite", "deci", _SILU),
    "phi3": Family("phi3", "deci", _SILU),
    "smollm3": Family("smollm3", "", (*_SILU, _every_fourth_without_rope)),
    "gemma3_text": Family("gemma3", "", (*_COMMON, _every_sixth_global)),
}


@dataclass(frozen=True)
class Choice:
    """The host for one Arch.

    Attributes:
        held: the model whose Arch the file will hold: the IR's own, and whatever zero-padding the host needs.
        notes: what was refused (errors), padded, folded or limited (notes and warnings), and what it costs.
    """

    host: Host
    held: ModelIR
    notes: tuple[Diagnostic, ...]

    def require(self) -> Choice:
        """This choice, or an AccError that says why there is none."""
        errors = [note for note in self.notes if note.level == "error"]
        if errors:
            raise AccError(*errors)
        return self


def rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rope parameters of the (global) attention layers, from either generation of Transformers configs."""
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    found = dict(found.get("full_attention", found))
    found.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    found.setdefault("rope_type", found.get("type", "default"))
    return found


def window(config: Mapping[str, Any]) -> int:
    """Tokens of context within which sliding-window attention equals full attention; 0: no such limit."""
    if config.get("use_sliding_window") is False or config.get("model_type") == "gemma3_text":
        return 0
    size = int(config.get("sliding_window") or 0)
    return size if size and size < int(config.get("max_position_embeddings") or 0) else 0


def choose(ir: ModelIR, block: int) -> Choice:
    """The host that holds `ir.arch`, padded where it must be.

    Args:
        block: columns per block of the number format, the width of an FFN that stands for a dropped one.
    """
    shape = ir.model_shape()
    family = FAMILIES.get(ir.family)
    if family is None:
        known = ", ".join(FAMILIES)
        note = Diagnostic(
            "LC001", ir.family, "acc knows no llama.cpp architecture that holds this family", f"known families: {known}"
        )
        return Choice(Host(ir.family), ir, (note,))
    own, uneven = HOSTS[family.own], HOSTS.get(family.uneven)
    reasons: list[str] = []
    for host in (own, uneven):
        if host is None:
            continue
        why = [reason for condition in family.conditions if (reason := condition(ir.config, shape, host))]
        why += [reason for reason in _shape_reasons(shape, host) if reason]
        if not why:
            held = hold(ir, host, block)
            return Choice(host, held, tuple(_notes(ir, held, host)))
        reasons += [f"`{host.arch}`: {reason}" for reason in why]
    return _padded(ir, own, family, reasons, block)


def _shape_reasons(shape: ModelShape, host: Host) -> Iterator[str]:
    present = [layer for layer in shape.layers if not layer.dropped]
    if not host.per_layer and not shape.uniform:
        yield "all layers must have one shape"
    if host.square and any(layer.heads * shape.head_dim != shape.hidden for layer in present):
        yield f"heads x head_dim must equal the hidden size {shape.hidden}"


def _padded(ir: ModelIR, own: Host, family: Family, reasons: list[str], block: int) -> Choice:
    """The own architecture with every layer padded to the widest; refused where that does not help."""
    even = hold(ir, own, block)
    shape = even.model_shape()
    why = [reason for condition in family.conditions if (reason := condition(ir.config, shape, own))]
    why += [reason for reason in _shape_reasons(shape, own) if reason]
    if why:
        text = "no llama.cpp architecture holds this shape: " + "; ".join(reasons)
        hint = "keep all layers alike (search with `uniform` or `minitron`), or serve it in another engine"
        return Choice(own, ir, (Diagnostic("LC002", ir.family, text, hint),))
    return Choice(own, even, tuple(_notes(ir, even, own)))


def hold(ir: ModelIR, host: Host, block: int) -> ModelIR:
    """The model with the zero-padding that a host needs: sizes grow, never shrink, and no logit changes."""
    shape = ir.model_shape()
    present = [index for index, layer in enumerate(shape.layers) if not layer.dropped]
    sizes: dict[str, int] = {}
    for index in present:
        layer = shape.layers[index]
        if layer.ffn == 0:
            sizes |= {f"mlp.{index}": 1, f"ffn.{index}": min(block if block > 1 else 32, ir.dims[f"ffn.{index}"].size)}
        if layer.heads == 0 and (index == present[0] or not host.no_attention):
            sizes |= {f"attn.{index}": 1, f"kv_group.{index}": 1, f"q_per_kv.{index}": 1}
    held = ir.resize(sizes) if sizes else ir
    if host.per_layer:
        return held
    roles = ("ffn", "kv_group", "q_per_kv")
    widest = {role: max(held.size(f"{role}.{index}") for index in present) for role in roles}
    sizes = {f"{role}.{index}": widest[role] for role in roles for index in present}
    changed = {name: size for name, size in sizes.items() if held.size(name) != size}
    return held.resize(changed) if changed else held


def _notes(ir: ModelIR, held: ModelIR, host: Host) -> Iterator[Diagnostic]:
    extra = held.parameters() - ir.parameters()
    if extra:
        share = extra / ir.parameters()
        text = f"`{host.arch}` cannot hold this shape as it is: {extra:,} zero weights ({share:.1%}) pad it"
        hint = "no logit changes"
        if not host.per_layer:
            hint += ", but every layer costs as much as the widest one; search with `uniform`"
        yield Diagnostic("LC003", ir.family, text, hint, "warning" if share > 0.01 else "note")
    if ir.family == "granite" and host.arch == "deci":
        text = "Granite's multipliers are folded into the weights; the output matrix is stored apart from the embedding"
        yield Diagnostic("LC004", ir.family, text, "", "note")
    if limit := window(ir.config):
        text = (
            f"the engine has no sliding window for this family: equal to the model up to {limit} tokens of context only"
        )
        yield Diagnostic("LC005", ir.family, text, f"the file announces a context of {limit} tokens", "warning")


def folds(ir: ModelIR, host: Host) -> dict[str, float]:
    """Factor per kind of tensor that moves the family's multipliers into the weights of a host without them."""
    config = ir.config
    if ir.family == "gemma3_text":
        scalar = float(config.get("query_pre_attn_scalar") or ir.head_dim())
        return {"attn_q_norm": math.sqrt(ir.head_dim() / scalar)} if scalar != ir.head_dim() else {}
    if ir.family != "granite" or host.arch != "deci":
        return {}
    residual = float(config.get("residual_multiplier", 1.0))
    return {
        "token_embd": float(config.get("embedding_multiplier", 1.0)),
        "attn_q": float(config.get("attention_multiplier", 1.0)) * math.sqrt(ir.head_dim()),
        "attn_output": residual,
        "ffn_down": residual,
        "output": 1.0 / float(config.get("logits_scaling", 1.0)),
    }
