"""What a cut must be equal to: the parent with what is cut away masked, everything in float64."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from acc.ir import ModelIR, present_tensors
from acc.model import build, config_for
from acc.slicing import cut_tensors, written_name


class KeepDouble(TorchFunctionMode):
    """Makes the models' casts to float32 leave float64 alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.to, torch.Tensor.float) and args[0].dtype == torch.float64:
            asked = torch.float32 if func is torch.Tensor.float else kwargs.get("dtype", args[1] if args[1:] else None)
            if asked == torch.float32:
                return args[0]
        return func(*args, **kwargs)


def double(model: PreTrainedModel) -> PreTrainedModel:
    """The model in float64, its scalar buffers computed anew in that precision."""
    model = model.double()
    for module in model.modules():
        if hasattr(module, "scalar_embed_scale"):
            cast(torch.Tensor, module.embed_scale).fill_(cast(float, module.scalar_embed_scale))
    return model


def random_parent(ir: ModelIR, seed: int = 0) -> PreTrainedModel:
    """A model of the traced configuration with random weights, norms and biases included."""
    torch.manual_seed(seed)
    model = double(build(ir.config))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model


def logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Logits in float64."""
    with torch.no_grad(), KeepDouble():
        found: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return found


def cut_model(ir: ModelIR, parent: PreTrainedModel) -> PreTrainedModel:
    """A model of the Arch with the parent's weights cut."""
    child = double(build(config_for(ir)))
    state = dict(cut_tensors(ir, parent.state_dict().__getitem__))
    for tensor in present_tensors(ir):
        state |= dict.fromkeys(tensor.aliases, state[written_name(ir, tensor)])
    child.load_state_dict(state)
    return child


def mask(ir: ModelIR, model: PreTrainedModel) -> None:
    """Zero in place everything that the Arch cuts away; norms over hidden count only the kept coordinates."""
    state = model.state_dict()
    with torch.no_grad():
        for tensor in ir.tensors.values():
            value = state[tensor.name]
            if not ir.present(tensor):
                value.zero_()
            for dimension, axis in enumerate(tensor.axes):
                kept = torch.zeros(value.shape[dimension], dtype=value.dtype)
                kept[ir.axis_indices(axis)] = 1
                value *= kept.view([-1 if place == dimension else 1 for place in range(value.ndim)])
    share = ir.size("hidden") / ir.dims["hidden"].size
    for tensor in ir.tensors.values():
        if tensor.axes == ((("hidden",),),) and tensor.name.endswith("norm.weight"):
            _count_kept(model.get_submodule(tensor.name.removesuffix(".weight")), share)


def _count_kept(norm: nn.Module, share: float) -> None:
    """Make an RMS norm divide its sum of squares by the kept coordinates only.

    With S the sum of squares over H coordinates, S / (share H) + eps = (S / H + share eps) / share.
    """
    for name in ("eps", "variance_epsilon"):
        if hasattr(norm, name):
            setattr(norm, name, getattr(norm, name) * share)
    norm.register_forward_hook(lambda _module, _args, out: out * share**0.5)
