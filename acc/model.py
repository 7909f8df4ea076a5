"""Uneven models as ordinary PyTorch modules: the configuration of an Arch, and models built or loaded from it.

Transformers has a schema for layers that differ (`per_layer_config`) but, up to 5.24, builds every layer from the
global configuration. Here each decoder layer is built from its own copy, and a sub-block in `skip` gives way to a
module that returns zeros.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from acc.diag import AccError
from acc.ir import LayerShape, ModelIR, ModelShape

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

Json = Mapping[str, Any]
_SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads")


# The configuration of an Arch ----------------------------------------------------------------------------------------


def kept_layers(ir: ModelIR) -> list[int]:
    """The traced numbers of the layers that a written model still has; it renumbers them from 0."""
    return [index for index, layer in enumerate(ir.model_shape().layers) if not layer.dropped]


def config_for(ir: ModelIR) -> dict[str, Any]:
    """The Hugging Face configuration of the Arch, as JSON: standard keys, and `per_layer_config` where layers differ.

    Layers of which nothing is left are deleted, and every list with one entry per layer (`layer_types`,
    `no_rope_layers`) with them. Token ids follow the kept vocabulary.
    """
    shape, layers = ir.model_shape(), kept_layers(ir)
    if not layers:
        raise AccError.of("ACC230", ir.family, "the architecture has no layer left", "keep at least one sub-block")
    depth = ir.depth()
    config = {
        key: [value[index] for index in layers] if isinstance(value, list) and len(value) == depth else value
        for key, value in ir.config.items()
        if key != "per_layer_config"
    }
    config |= {"hidden_size": shape.hidden, "vocab_size": shape.vocab, "head_dim": shape.head_dim}
    config |= {"num_hidden_layers": len(layers), "tie_word_embeddings": shape.tied}
    config |= _token_ids(ir, config)
    return config | _layer_sizes([shape.layers[index] for index in layers])


def _layer_sizes(layers: list[LayerShape]) -> dict[str, Any]:
    """The most common sizes as global keys, the others and the dropped sub-blocks as `per_layer_config`."""
    attention = Counter((layer.heads, layer.kv_heads) for layer in layers if layer.heads)
    ffn = Counter(layer.ffn for layer in layers if layer.ffn)
    heads = attention.most_common(1)[0][0] if attention else (1, 1)
    common = dict(zip(_SIZES, (ffn.most_common(1)[0][0] if ffn else 1, *heads), strict=True))
    uneven: dict[str, dict[str, Any]] = {}
    for index, layer in enumerate(layers):
        skip = [name for name, size in (("attention", layer.heads), ("mlp", layer.ffn)) if not size]
        own = {
            key: size
            for key, size in zip(_SIZES, (layer.ffn, layer.heads, layer.kv_heads), strict=True)
            if size and size != common[key]
        }
        if own or skip:
            uneven[str(index)] = own | ({"skip": skip} if skip else {})
    if not uneven:
        return common
    # Without the switch Transformers' own validators refuse to read the global sizes, and AutoConfig fails.
    return common | {"per_layer_config": uneven, "allow_global_per_layer_attribute_access": True}


def _token_ids(ir: ModelIR, config: Json) -> dict[str, Any]:
    """The `*_token_id` entries in the numbering of the kept vocabulary; None for a token that is gone."""
    vocab = ir.select("vocab")[0]
    if ir.size(vocab.name) == vocab.size:
        return {}
    place = {old: new for new, old in enumerate(ir.kept(vocab.name))}
    found: dict[str, Any] = {}
    for key, value in config.items():
        if key.endswith("_token_id") and isinstance(value, int):
            found[key] = place.get(value)
        elif key.endswith("_token_id") and isinstance(value, list):
            found[key] = [place[one] for one in value if one in place]
    return found


# Building ------------------------------------------------------------------------------------------------------------


def build(config_json: Json) -> PreTrainedModel:
    """A model of this configuration, uneven or not, with freshly initialised float32 weights, in eval mode."""
    model = _assemble(config_json)
    for layer in decoder_layers(model) if config_json.get("per_layer_config") else ():
        layer.apply(model._init_weights)
    return model.eval()


def skeleton(config_json: Json) -> PreTrainedModel:
    """A model whose parameters are on meta and take no memory; its buffers, such as rope frequencies, are real."""
    from accelerate import init_empty_weights

    with init_empty_weights():
        return _assemble(config_json)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of the model's decoder layers."""
    from torch import nn

    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == model.config.num_hidden_layers:
            return module
    raise AccError.of("ACC202", model.config.model_type, "the model keeps no list of decoder layers")


def _assemble(config_json: Json) -> PreTrainedModel:
    """Build the model under the caller's device context; with `per_layer_config`, layer by layer."""
    from transformers import AutoModelForCausalLM

    config = _read_config({key: value for key, value in config_json.items() if key != "per_layer_config"})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    uneven = config_json.get("per_layer_config")
    if not uneven:
        return model
    branches = _branches(config) if any(own.get("skip") for own in uneven.values()) else []
    model.config.per_layer_config = uneven
    layers = decoder_layers(model)
    for index, own in enumerate(model.config.per_layer_config):
        layers[index] = type(layers[index])(own, index)
        for skipped in own.skip:
            _drop(layers[index], skipped, branches[index], index)
    return model


def _read_config(config_json: Json) -> PretrainedConfig:
    """The configuration object of a uniform configuration.

    Some classes refuse a hidden size that the heads do not divide even where an explicit `head_dim` makes that moot,
    so the object is made with a hidden size that suits and then given the real one.
    """
    from transformers import AutoConfig

    values = {key: value for key, value in config_json.items() if key not in ("model_type", "transformers_version")}
    hidden, head_dim = values.get("hidden_size"), values.get("head_dim")
    suits = bool(head_dim and "num_attention_heads" in values)
    if suits:
        values["hidden_size"] = head_dim * values["num_attention_heads"]
    try:
        config = AutoConfig.for_model(config_json["model_type"], **values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = str(error).splitlines()[-1].strip()
        raise AccError.of("ACC231", "config.json", f"Transformers refuses the configuration: {reason}") from error
    if suits:
        config.hidden_size = hidden
    return cast("PretrainedConfig", config)


# Sub-blocks ----------------------------------------------------------------------------------------------------------


def _branches(config: PretrainedConfig) -> list[dict[str, set[str]]]:
    """Per layer, the names of the children that form its attention branch and its mlp branch, norms included.

    Found by running the model once on meta tensors: the child inside which attention is computed, the child with
    other matrices, and the norms that stand directly before or after one of them.
    """
    import copy

    import torch
    from torch.overrides import TorchFunctionMode
    from transformers import AutoModelForCausalLM

    inside: list[tuple[int, str]] = []
    attention: set[tuple[int, str]] = set()

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.nn.functional.scaled_dot_product_attention and inside:
                attention.add(inside[-1])
            return func(*args, **(kwargs or {}))

    with torch.device("meta"), torch.no_grad():
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa").eval()
        calls: list[tuple[int, str, Any, Any]] = []
        for index, layer in enumerate(decoder_layers(model)):
            for name, child in layer.named_children():
                place = (index, name)
                child.register_forward_pre_hook(lambda *_, place=place: inside.append(place))
                child.register_forward_hook(
                    lambda _m, args, kwargs, out, place=place: calls.append(
                        (*inside.pop(), args[0] if args else kwargs["hidden_states"], _first(out))
                    ),
                    with_kwargs=True,
                )
        with Watch():
            model(input_ids=torch.zeros(1, 4, dtype=torch.long), use_cache=True)  # without a cache it looks at values
    return [
        _group(layer, [call[1:] for call in calls if call[0] == index], {n for i, n in attention if i == index})
        for index, layer in enumerate(decoder_layers(model))
    ]


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


def _group(layer: nn.Module, calls: list[tuple[str, Any, Any]], attention: set[str]) -> dict[str, set[str]]:
    """Sort the children of one layer into its two branches, from what each read and returned."""
    groups: dict[str, set[str]] = {"attention": set(), "mlp": set()}
    for name, read, returned in calls:
        if not any(parameter.ndim > 1 for parameter in layer.get_submodule(name).parameters()):
            continue  # a norm or a dropout
        beside = {other for other, r, w in calls if other != name and (w is read or r is returned)}
        groups["attention" if name in attention else "mlp"] |= {name, *beside}
    shared = groups["attention"] & groups["mlp"]  # the one norm of parallel branches stays
    return {kind: names - shared for kind, names in groups.items()}


def _drop(layer: nn.Module, skipped: str, branches: dict[str, set[str]], index: int) -> None:
    """Replace the children of one branch: those with matrices by zeros, its norms by nothing."""
    from torch import nn

    if skipped not in branches:
        raise AccError.of("ACC231", f"per_layer_config.{index}", f"unknown sub-block `{skipped}` in `skip`")
    for name in branches[skipped]:
        child = layer.get_submodule(name)
        is_norm = not any(parameter.ndim > 1 for parameter in child.parameters())
        setattr(layer, name, nn.Identity() if is_norm else _absent(skipped, index))


def _absent(skipped: str, index: int) -> nn.Module:
    """A sub-block that adds nothing to the residual stream."""
    import torch
    from torch import nn

    class AbsentMLP(nn.Module):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(hidden_states)

    class AbsentAttention(nn.Module):
        def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
            cache = kwargs.get("cache", kwargs.get("past_key_values"))
            if cache is not None:  # the cache counts tokens in every layer, layer 0 first of all
                nothing = hidden_states.new_zeros(hidden_states.shape[0], 1, hidden_states.shape[1], 1)
                cache.update(nothing, nothing, index)
            return torch.zeros_like(hidden_states), None

    return AbsentAttention() if skipped == "attention" else AbsentMLP()


# Loading -------------------------------------------------------------------------------------------------------------


def load(folder: str | Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load a Hugging Face folder, uneven or not, sharded or not, as a PyTorch model on the CPU in eval mode.

    Args:
        folder: holds `config.json` and safetensors files.
        dtype: of the weights; float32 if None.
    """
    import torch
    from transformers import GenerationConfig

    folder = Path(folder)
    model = skeleton(read_config(folder))
    with torch.no_grad():
        _fill(model, folder, dtype or torch.float32)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def read_config(folder: Path) -> dict[str, Any]:
    """The JSON of `config.json`."""
    try:
        return cast(dict[str, Any], json.loads((folder / "config.json").read_text("utf-8")))
    except (OSError, ValueError) as error:
        raise AccError.of("ACC232", str(folder), "has no readable config.json", "give a Hugging Face folder") from error


def _fill(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    """Give every parameter of a model on meta its tensor, one at a time; refuse what does not match."""
    from torch import nn

    from acc.checkpoint import Checkpoint

    stored = Checkpoint.at(folder)
    wanted = model.state_dict()
    ties = dict(model.all_tied_weights_keys) if model.config.tie_word_embeddings else {}
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    found, unexpected = set(), []
    for name in stored.names():
        if name not in wanted:
            unexpected += [] if any(pattern.search(name) for pattern in ignored) else [name]
            continue
        tensor = stored.read(name)
        if tuple(tensor.shape) != tuple(wanted[name].shape):
            raise AccError.of(
                "ACC233", name, f"has shape {list(tensor.shape)}, the configuration says {list(wanted[name].shape)}"
            )
        found.add(name)
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        tensor = tensor.to(dtype) if tensor.is_floating_point() else tensor
        if leaf in module._parameters:
            module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        else:
            module._buffers[leaf] = tensor
    missing = sorted(wanted.keys() - found - {target for target, source in ties.items() if source in found})
    for names, what in ((missing, "missing"), (sorted(unexpected), "not part of the model")):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise AccError.of(
                "ACC234", str(folder), f"tensors are {what}: {', '.join(names[:3])}{more}", "see that config.json fits"
            )
    model.tie_weights()


__all__ = ["ModelShape", "build", "config_for", "decoder_layers", "kept_layers", "load", "read_config", "skeleton"]
