"""What a GGUF header says of its model, as a Hugging Face config.json.

Only keys whose meaning is known are accepted: one that would be ignored would be another model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from acc.checkpoint.gguf_header import Header, contradiction
from acc.diag import AccError

if TYPE_CHECKING:
    import torch

_INSTEAD = "give the Hugging Face folder of the model instead"


@dataclass(frozen=True)
class Family:
    """How llama.cpp's converter (conversion/*.py) writes one architecture.

    Attributes:
        model_type: Transformers' name.
        rotary_pairs: the rows of Q and K are in the order of rotary pairs, not of Transformers' halves.
        norm_offset: what the converter added to every norm weight.
        keys: metadata keys of the family's own and the config entries that they fill.
        optional_biases: whether biases of attention and MLP are options of the config.
    """

    model_type: str
    rotary_pairs: bool = False
    norm_offset: float = 0.0
    keys: Mapping[str, str] = field(default_factory=dict)
    optional_biases: bool = True


_SWA = {"attention.sliding_window": "sliding_window"}
_GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
FAMILIES = {
    "llama": Family("llama", rotary_pairs=True),
    "qwen2": Family("qwen2", optional_biases=False),
    "qwen3": Family("qwen3"),
    "gemma3": Family("gemma3_text", norm_offset=1.0, keys={**_SWA, "rope.freq_base_swa": "rope_local_base_freq"}),
    "phi3": Family("phi3", keys=_SWA, optional_biases=False),
    "smollm3": Family("smollm3", rotary_pairs=True),
    "granite": Family("granite", rotary_pairs=True, keys=_GRANITE),
}
_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_READ_ELSEWHERE = {
    "vocab_size",
    "rope.freq_base",
    "rope.dimension_count",
    "attention.key_length",
    "attention.value_length",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
}


def family_of(header: Header) -> Family:
    """The family of a file whose every key is understood.

    Raises:
        AccError: ACC122 for another architecture or one part of a split file, ACC123 for a key that is not known.
    """
    where, architecture = str(header.path), header.architecture
    if architecture not in FAMILIES:
        told = f"GGUF files of architecture `{architecture}` are not read (known: {', '.join(sorted(FAMILIES))})."
        raise AccError.of("ACC122", where, told, _INSTEAD)
    if header.metadata.get("split.count", 1) not in (0, 1):
        hint = "join the parts with llama-gguf-split --merge"
        raise AccError.of("ACC122", where, "this is one part of a split GGUF.", hint)
    family = FAMILIES[architecture]
    known = {f"{architecture}.{key}" for key in {*_KEYS, *family.keys, *_READ_ELSEWHERE}}
    for key, value in header.metadata.items():
        if key.startswith(f"{architecture}.") and key not in known and value:
            raise _not_carried(header, f"it states `{key}` = {value}")
    return family


def config_of(
    header: Header, family: Family, *, tied: bool, dtype: str, frequencies: torch.Tensor | None
) -> dict[str, Any]:
    """config.json of the file; head_dim, tie_word_embeddings, token ids and dtype are always explicit.

    Args:
        tied: whether one matrix serves as embedding and output projection.
        dtype: Torch's name of the number format that the weights will have.
        frequencies: the divisors of the rotary frequencies that some files store (`rope_freqs`), [head_dim / 2].
    """
    from transformers import AutoConfig, PretrainedConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    values = _sizes(header, family)
    values |= _rope(header, values["head_dim"], frequencies)
    explicit = {**_token_ids(header), "tie_word_embeddings": tied, "head_dim": values["head_dim"]}
    if family.optional_biases:
        values["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
        values["mlp_bias"] = "blk.0.ffn_up.bias" in header.tensors
    if family.model_type == "gemma3_text":
        largest = values["num_hidden_layers"] == 62  # the 27B scales by hidden size (llama.cpp, src/models/gemma3.cpp)
        spread = values["hidden_size"] // values["num_attention_heads"]
        values["query_pre_attn_scalar"] = spread if largest else values["head_dim"]
    try:
        config = AutoConfig.for_model(family.model_type, **(values | explicit))
    except Exception as error:  # configuration classes validate with whatever they like
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1].strip().rstrip(".")
        raise contradiction(header, f"Transformers refuses its sizes ({reason})") from error
    common = PretrainedConfig().to_dict()  # entries without meaning here, such as id2label
    found = {key: value for key, value in config.to_dict().items() if key not in common or common[key] != value}
    return {
        **found,
        **explicit,
        "dtype": dtype,
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family.model_type]],
    }


def _sizes(header: Header, family: Family) -> dict[str, Any]:
    """The sizes in Transformers' words, plausible enough to build a model of them."""
    keys = {**_KEYS, **family.keys}
    values = {name: found for key, name in keys.items() if (found := _uniform(header, key)) is not None}
    for key, name in _KEYS.items():
        if name not in values and name != "num_key_value_heads":
            raise contradiction(header, f"`{header.architecture}.{key}` is missing")
    layers, hidden, heads = (values[k] for k in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    if not 1 <= layers <= len(header.tensors):  # before a model of that depth is built
        raise contradiction(header, f"it states {layers} layers and has {len(header.tensors)} tensors")
    if not 1 <= heads <= hidden or not all(isinstance(size, int) for size in (layers, hidden, heads)):
        raise contradiction(header, f"it states {heads} heads and hidden size {hidden}")
    values["head_dim"] = header.number("attention.key_length") or hidden // heads
    values["vocab_size"] = header.tensor("token_embd.weight").shape[0]
    return values


def _uniform(header: Header, key: str) -> float | None:
    """A scalar entry; a list of one value per layer counts if all are equal."""
    value = header.get(key)
    if not isinstance(value, list):
        return header.number(key)
    if len(set(value)) != 1 or not isinstance(value[0], int | float):
        told = f"`{header.architecture}.{key}` differs from layer to layer, and only uniform files are read"
        raise _not_carried(header, told)
    return value[0]


def _token_ids(header: Header) -> dict[str, Any]:
    names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    found = {name: header.metadata.get(f"tokenizer.ggml.{key}") for name, key in names.items()}
    rows = header.tensor("token_embd.weight").shape[0]
    for name, token in found.items():
        if token is not None and not (isinstance(token, int) and 0 <= token < rows):
            raise contradiction(header, f"its {name} is {token}, with {rows} tokens")
    return found


def _rope(header: Header, head_dim: int, frequencies: torch.Tensor | None) -> dict[str, Any]:
    """Base and scaling of the rotary embedding."""
    found: dict[str, Any] = {"rope_theta": header.number("rope.freq_base") or 10000.0}
    if (rotated := header.number("rope.dimension_count") or head_dim) != head_dim:
        found["partial_rotary_factor"] = rotated / head_dim
    kind = header.get("rope.scaling.type", "none")
    if kind == "linear":
        found["rope_scaling"] = {"rope_type": "linear", "factor": header.number("rope.scaling.factor") or 1.0}
    elif kind != "none":
        raise _not_carried(header, f"it states rotary scaling of type `{kind}`")
    if frequencies is not None:
        found["rope_scaling"] = _llama3_scaling(header, found["rope_theta"], head_dim, frequencies)
    return found


def _llama3_scaling(header: Header, theta: float, head_dim: int, divisors: torch.Tensor) -> dict[str, Any]:
    """The Llama 3.1 scaling that gives these divisors; the usual wavelengths are tried, the factor is read off."""
    import torch

    factor = float(divisors.max())
    wavelength = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    smooth = ((8192 / wavelength - 1) / 3).clamp(0, 1)
    expected = (1 - smooth) / factor + smooth
    if divisors.shape != smooth.shape or not torch.allclose(1 / divisors.double(), expected, rtol=1e-3):
        raise _not_carried(header, "its rotary frequency factors are not those of the Llama 3.1 scaling")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _not_carried(header: Header, what: str) -> AccError:
    return AccError.of("ACC123", str(header.path), f"{what}, which acc cannot carry over.", _INSTEAD)
