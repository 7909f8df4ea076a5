"""From a Transformers configuration to the ModelIR: export on meta tensors, derive the axes, name the dims.

Nothing here or in what it calls knows a model family. The graph comes from `torch.export` (`graph`), the axes from the
op rules (`rules`, over the algebra of `axes`), names and roles from the place of each dim in the graph (`naming`), and
the presence of layers and sub-blocks from the residual stream (`presence`). What a configuration cannot say is pinned
(`probe`); numbers in the code that depend on the hidden size are found by comparison (`rescale`).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from acc.diag import AccError
from acc.ir import ModelIR, Op, Tensor
from acc.trace import naming, presence, probe, rescale
from acc.trace.axes import solved
from acc.trace.graph import Graph, export, shapes_of, solve, target_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}


def trace(config: PretrainedConfig) -> ModelIR:
    """Derive the ModelIR of a causal language model from its configuration alone; no weights are read.

    Raises:
        AccError: the model is not a text decoder, or it does not export; the diagnostic says what remains possible.
    """
    refuse_other_models(config)
    config_json = to_json(config)
    graph, ir = _derive(config_json)
    small_json = probe.ends(config_json)
    small_graph, small = (graph, ir) if small_json == config_json else _derive(small_json)
    scales, dims = rescale.find(graph, small_graph, small_json, dict(ir.dims))
    tensors = {name: replace(tensor, rescale=scales.get(name)) for name, tensor in ir.tensors.items()}
    return replace(ir, dims=probe.pin_unsayable(small, dims), tensors=tensors)


def _derive(config_json: dict[str, Any]) -> tuple[Graph, ModelIR]:
    """The graph, and what it says by itself."""
    graph = solve(*export(config_json))
    names, dims = naming.name(graph)
    exists, presence_dims = presence.find(graph, config_json)
    dtype = _DTYPES.get(str(config_json.get("dtype") or "float32"), "F32")
    tensors = {
        name: Tensor(
            name,
            tuple(tuple(tuple(names[var] for var in segment) for segment in solved(axis)) for axis in value.axes),
            dtype,
            exists.get(name, ()),
            graph.aliases.get(name, ()),
        )
        for name, value in graph.tensors.items()
    }
    return graph, ModelIR(str(config_json["model_type"]), config_json, dims | presence_dims, tensors, _ops(graph))


def to_json(config: PretrainedConfig) -> dict[str, Any]:
    """The configuration as JSON, without what depends on where it was read or by which version."""
    from transformers import AutoModelForCausalLM

    values: dict[str, Any] = json.loads(json.dumps(config.to_dict()))
    for key in ("_name_or_path", "transformers_version", "id2label", "label2id"):
        values.pop(key, None)
    values["model_type"] = config.model_type
    known = AutoModelForCausalLM._model_mapping
    if not values.get("architectures") and type(config) in known:
        values["architectures"] = [known[type(config)].__name__]
    return values


def refuse_other_models(config: PretrainedConfig) -> None:
    """Raise for everything that is not a decoder of text: encoders, encoder-decoders, models of several media."""
    from transformers.models.auto import modeling_auto

    kind, names = config.model_type, config.architectures or []
    nothing = "acc compresses causal language models; nothing can be cut from this one"
    if config.get_text_config() is not config:
        raise AccError.of(
            "ACC202", kind, "is a model of several media, not a text decoder", "give the folder of its text model alone"
        )
    if config.is_encoder_decoder:
        raise AccError.of("ACC202", kind, "is an encoder-decoder, not a causal language model", nothing)
    if kind not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise AccError.of("ACC202", kind, "Transformers has no causal language model of this type", nothing)
    also_encoder = kind in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)
    if also_encoder or (names and not any("CausalLM" in name or "LMHead" in name for name in names)):
        raise AccError.of("ACC202", kind, "is an encoder or has no language model head", nothing)


def _ops(graph: Graph) -> tuple[Op, ...]:
    """The graph as the IR keeps it: parameters under their stored names, ops numbered in this order."""
    names = {**{node: node.name for node in graph.nodes}, **graph.buffers, **graph.stored}
    calls = [node for node in graph.nodes if node.op == "call_function"]
    counts: Counter[str] = Counter()
    for node in calls:
        base = re.sub(r"_\d+$", "", node.name)
        names[node] = f"{base}_{counts[base]}" if counts[base] else base
        counts[base] += 1
    return tuple(
        Op(names[node], target_of(node), tuple(names[n] for n in node.all_input_nodes), shapes_of(node)[0])
        for node in calls
    )
