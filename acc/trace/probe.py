"""Whether a configuration can say what the graph would allow: smaller models are built, without weights, and compared.

A dim that the graph leaves free is of no use if the model's code cannot be told another size (a head size that always
follows from the hidden size, a width under a key of its own). So for every role a smaller Arch is written as a
configuration and built on meta; if its tensors do not have the shapes that the IR says, the role is pinned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from acc.diag import AccError
from acc.ir import PRESENCE_ROLES, Arch, Dim, ModelIR, Role, present_tensors
from acc.model import config_for, skeleton
from acc.slicing import written_name

_ROLES: tuple[Role, ...] = ("hidden", "vocab", "ffn", "kv_group", "q_per_kv", *PRESENCE_ROLES)


def ends(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a model with the first and the last layer only, its head size explicit."""
    depth = config.get("num_hidden_layers")
    if depth is None:
        return dict(config)  # a class with keys of its own; its whole depth then
    kept = sorted({0, depth - 1})
    small = {
        key: [value[layer] for layer in kept] if isinstance(value, list) and len(value) == depth else value
        for key, value in config.items()
        if key != "per_layer_config"
    }
    small["num_hidden_layers"] = len(kept)
    if not small.get("head_dim") and {"hidden_size", "num_attention_heads"} <= config.keys():
        small["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    return small


def pin_unsayable(small: ModelIR, dims: Mapping[str, Dim]) -> dict[str, Dim]:
    """The dims of the model, those of a role pinned whose other sizes the configuration of `small` cannot say."""
    reasons = {role: _reason(small, role) for role in _ROLES if any(dim.role == role for dim in dims.values())}
    return {
        name: replace(dim, state="pinned", why=reasons[dim.role])
        if dim.state == "free" and reasons.get(dim.role)
        else dim
        for name, dim in dims.items()
    }


def _reason(small: ModelIR, role: Role) -> str:
    """Why a smaller size of a role cannot be built, or ""."""
    free = small.select(role, free=True)
    if not free:
        return ""
    dim = free[-1]
    smaller = 0 if role in PRESENCE_ROLES else dim.size - 1
    if smaller < (0 if role in PRESENCE_ROLES else 1) or (role == "layer" and small.depth() == 1):
        return ""
    ir = small.with_arch(Arch({dim.name: smaller}))
    try:
        built = {name: tuple(tensor.shape) for name, tensor in skeleton(config_for(ir)).state_dict().items()}
    except AccError as error:
        return f"a configuration with less of it cannot be built: {error.diagnostics[0].message}"
    except Exception as error:  # the model's code may raise anything at sizes that its authors did not foresee
        return f"the model cannot be built with less of it: {type(error).__name__}: {error}".splitlines()[0]
    wanted = {written_name(ir, tensor): ir.shape(tensor) for tensor in present_tensors(ir)}
    return _difference(wanted, built, {alias for tensor in ir.tensors.values() for alias in tensor.aliases})


def _difference(
    wanted: Mapping[str, tuple[int, ...]], built: Mapping[str, tuple[int, ...]], aliases: Iterable[str]
) -> str:
    """The first tensor that a smaller configuration gives another shape than the IR says, in words."""
    for name in sorted(wanted.keys() | (built.keys() - set(aliases))):
        if wanted.get(name) != built.get(name):
            return f"the configuration cannot say another size: `{name}` would not follow"
    return ""
