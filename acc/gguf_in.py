"""A GGUF file as input: decoded once into a Hugging Face folder, tensor by tensor.

Numbers: a block-quantised file is decoded to float32, since `scale * q + minimum` of two float16 takes more bits than
bfloat16 has; a file of bfloat16 or float16 matrices keeps that type when its float32 vectors lose nothing by it.
Only keys and tensors whose meaning is known are accepted: one that would be ignored would be another model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acc.checkpoint import file_digest
from acc.checkpoint_check import check_numbers
from acc.checkpoint_write import all_or_nothing, fill
from acc.diag import AccError
from acc.gguf_header import Header, TensorInfo, read_header
from acc.gguf_tokenizer import write_tokenizer

if TYPE_CHECKING:
    import torch

_VERSION = 1
"""Raise it when the same file would be decoded otherwise: it is part of the folder's name in the cache."""
_CHUNK_BYTES = 32 << 20
"""Decoded bytes per chunk of rows."""


@dataclass(frozen=True)
class _Family:
    """How llama.cpp's converter writes one architecture.

    Attributes:
        model_type: Transformers' name.
        rotary_pairs: the rows of Q and K are in rotary-pair order (interleaved), not in Transformers' half-split order.
        norm_offset: what the converter added to every norm weight.
        keys: metadata keys of the family's own and the config entries that they fill.
    """

    model_type: str
    rotary_pairs: bool = False
    norm_offset: float = 0.0
    keys: tuple[tuple[str, str], ...] = ()


_FAMILIES = {
    "llama": _Family("llama", rotary_pairs=True),
    "qwen2": _Family("qwen2"),
    "qwen3": _Family("qwen3"),
    "gemma3": _Family("gemma3_text", norm_offset=1.0, keys=(("attention.sliding_window", "sliding_window"),)),
    "phi3": _Family("phi3", keys=(("attention.sliding_window", "sliding_window"),)),
    "smollm3": _Family("smollm3", rotary_pairs=True),
    "granite": _Family(
        "granite",
        rotary_pairs=True,
        keys=(
            ("attention.scale", "attention_multiplier"),
            ("embedding_scale", "embedding_multiplier"),
            ("residual_scale", "residual_multiplier"),
            ("logit_scale", "logits_scaling"),
        ),
    ),
}
_KEYS = (
    ("context_length", "max_position_embeddings"),
    ("embedding_length", "hidden_size"),
    ("block_count", "num_hidden_layers"),
    ("feed_forward_length", "intermediate_size"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
)
_DERIVED = {
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


def convert(path: Path, cache: Path) -> Path:
    """The Hugging Face folder of a GGUF file, made once per content and kept in `cache`.

    Raises:
        AccError: ACC120 to ACC124 for a bad or unsupported file, ACC108 for broken weights, ACC14x if the cache
            cannot be written.
    """
    header = read_header(path)
    family = _family(header)
    folder = cache / "gguf" / f"{file_digest(path, cache)[:32]}-{_VERSION}"
    if (folder / "config.json").is_file():
        return folder
    with all_or_nothing(folder) as scratch:
        config = _config(header, family)
        fill(scratch, config, _decoded(header, family, config))
        write_tokenizer(header, scratch)
    return folder


def _family(header: Header) -> _Family:
    """The family of a file whose every key and tensor type is understood."""
    where, architecture = str(header.path), header.architecture
    if architecture not in _FAMILIES:
        raise AccError.of(
            "ACC122",
            where,
            f"GGUF files of architecture `{architecture}` are not read (known: {', '.join(sorted(_FAMILIES))}).",
            "give the Hugging Face folder of the model instead",
        )
    if header.metadata.get("split.count", 1) > 1:
        raise AccError.of(
            "ACC122", where, "this is one part of a split GGUF.", "join the parts with llama-gguf-split --merge"
        )
    family = _FAMILIES[architecture]
    known = {f"{architecture}.{key}" for key in {*dict(_KEYS), *dict(family.keys), *_DERIVED}}
    for key, value in header.metadata.items():
        if key.startswith(f"{architecture}.") and key not in known and value:
            raise AccError.of(
                "ACC123",
                where,
                f"the file states `{key}` = {value}, which acc does not know how to carry over.",
                "give the Hugging Face folder of the model instead",
            )
    return family


def _config(header: Header, family: _Family) -> dict[str, Any]:
    """config.json of the file; head_dim, tie_word_embeddings, token ids and dtype are always explicit."""
    from transformers import AutoConfig, PretrainedConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    stated = {name: _number(header, key) for key, name in (*_KEYS, *family.keys) if header.get(key) is not None}
    for key, name in _KEYS:
        if name not in stated and name != "num_key_value_heads":
            raise _inconsistent(header, f"`{header.architecture}.{key}` is missing")
    values = {**stated, **_token_ids(header), **_rope(header, stated)}
    values["head_dim"] = _head_dim(header, stated)
    values["vocab_size"] = _info(header, "token_embd.weight").shape[0]
    values["tie_word_embeddings"] = _embedding(header)[1]
    values["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    values["mlp_bias"] = "blk.0.ffn_up.bias" in header.tensors
    if family.model_type == "gemma3_text":
        values["query_pre_attn_scalar"] = values["head_dim"]
    if family.model_type == "qwen2":
        del values["attention_bias"], values["mlp_bias"]  # its biases are not an option
    try:
        config = AutoConfig.for_model(family.model_type, **values)
    except Exception as error:  # configuration classes validate with whatever they like
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1].strip().rstrip(".")
        raise _inconsistent(header, f"Transformers refuses its sizes ({reason})") from error
    common = PretrainedConfig().to_dict()  # entries without meaning here, such as id2label
    found = {key: value for key, value in config.to_dict().items() if key not in common or common[key] != value}
    found |= {name: values[name] for name in (*_token_ids(header), "tie_word_embeddings")}
    found["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family.model_type]]
    found["head_dim"] = values["head_dim"]
    found["dtype"] = _float_type(header)
    return found


def _number(header: Header, key: str) -> float:
    """A scalar entry; a list of one value per layer counts if all are equal."""
    value = header.get(key)
    if isinstance(value, list) and value and len(set(value)) == 1:
        value = value[0]
    if not isinstance(value, int | float):
        raise AccError.of(
            "ACC123",
            str(header.path),
            f"`{header.architecture}.{key}` differs from layer to layer; only uniform GGUF files are read.",
            "give the Hugging Face folder of the model instead",
        )
    return value


def _inconsistent(header: Header, what: str) -> AccError:
    told = f"the GGUF file contradicts itself: {what}."
    return AccError.of("ACC124", str(header.path), told, "download the file again, or convert the model again")


def _token_ids(header: Header) -> dict[str, Any]:
    names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    return {name: header.metadata.get(f"tokenizer.ggml.{key}") for name, key in names.items()}


def _head_dim(header: Header, stated: dict[str, Any]) -> int:
    heads = int(stated["num_attention_heads"])
    if heads < 1 or stated["hidden_size"] < 1:
        raise _inconsistent(header, f"it has {heads} heads and hidden size {stated['hidden_size']}")
    return int(header.get("attention.key_length") or stated["hidden_size"] // heads)


def _rope(header: Header, stated: dict[str, Any]) -> dict[str, Any]:
    """Base and scaling of the rotary embedding, in Transformers' words."""
    head_dim = _head_dim(header, stated)
    found: dict[str, Any] = {"rope_theta": header.get("rope.freq_base", 10000.0)}
    if (rotated := header.get("rope.dimension_count", head_dim)) != head_dim:
        found["partial_rotary_factor"] = rotated / head_dim
    kind, factor = header.get("rope.scaling.type", "none"), header.get("rope.scaling.factor", 1.0)
    if kind == "linear":
        found["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif kind != "none":
        raise AccError.of(
            "ACC123",
            str(header.path),
            f"rotary scaling of type `{kind}` is not carried over.",
            "give the Hugging Face folder of the model instead",
        )
    if "rope_freqs.weight" in header.tensors:
        found["rope_scaling"] = _llama3_scaling(header, found["rope_theta"], head_dim)
    return found


def _llama3_scaling(header: Header, theta: float, head_dim: int) -> dict[str, Any]:
    """The Llama 3.1 scaling whose frequency factors the file stores (as `rope_freqs`)."""
    import torch

    stored = _values(header, _info(header, "rope_freqs.weight")).float()
    factor = float(stored.max())
    wavelength = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    smooth = ((8192 / wavelength - 1) / 3).clamp(0, 1)
    if stored.shape != smooth.shape or not torch.allclose(
        1 / stored.double(), (1 - smooth) / factor + smooth, rtol=1e-3
    ):
        raise AccError.of(
            "ACC123",
            str(header.path),
            "its rotary frequency factors are not those of the Llama 3.1 scaling.",
            "give the Hugging Face folder of the model instead",
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _info(header: Header, name: str) -> TensorInfo:
    if name not in header.tensors:
        raise _inconsistent(header, f"the tensor `{name}` is missing")
    return header.tensors[name]


def _embedding(header: Header) -> tuple[TensorInfo, bool]:
    """The tensor to take for the embedding, and whether it serves as the output projection too.

    Some files of tied models store both ends, quantised differently. Then the two are one matrix up to rounding, and
    the finer one stands for both: read as untied, the model would have parameters that its parent never had.
    """
    import torch

    first, last = _info(header, "token_embd.weight"), header.tensors.get("output.weight")
    if last is None:
        return first, True
    if last.shape != first.shape:
        return first, False
    step = max(1, first.shape[0] // 512)
    a, b = (_values(header, info, rows=slice(0, None, step)).float() for info in (first, last))
    same = torch.linalg.vector_norm(a - b) < 0.2 * torch.linalg.vector_norm(b)
    return (max(first, last, key=lambda info: info.bytes), True) if same else (first, False)


def _float_type(header: Header) -> str:
    """The number format of the decoded model (see the head of this file)."""
    import torch

    matrices = {info.type for info in header.tensors.values() if len(info.shape) > 1}
    name = {"BF16": "bfloat16", "F16": "float16"}.get(matrices.pop(), "float32") if len(matrices) == 1 else "float32"
    dtype = getattr(torch, name)
    for info in header.tensors.values():
        if dtype != torch.float32 and info.type == "F32":
            value = _values(header, info)
            if not torch.equal(value.to(dtype).float(), value):
                return "float32"
    return name


def _values(header: Header, info: TensorInfo, rows: slice = slice(None)) -> torch.Tensor:
    """A tensor decoded to float32 (to its own type if it is F16 or BF16), some rows at a time."""
    import numpy as np
    import torch
    from gguf import GGMLQuantizationType, dequantize

    raw = np.memmap(header.path, mode="r", offset=info.start, shape=(info.bytes,), dtype=np.uint8)
    plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    packed = raw.reshape(-1, info.bytes // (_size(info) // info.shape[-1]))[rows]
    if info.type in plain:
        return torch.from_numpy(packed.copy()).view(plain[info.type]).reshape(-1, *info.shape[1:])
    out = torch.empty(len(packed), info.shape[-1])
    step = max(1, _CHUNK_BYTES // (4 * info.shape[-1]))
    try:
        for start in range(0, len(packed), step):
            chunk = dequantize(packed[start : start + step], GGMLQuantizationType[info.type])
            out[start : start + step] = torch.from_numpy(chunk)
    except NotImplementedError as error:
        told = f"tensor `{info.name}` is stored as {info.type}, which cannot be decoded."
        raise AccError.of("ACC122", str(header.path), told, "give a less exotic quantisation of the model") from error
    return out.reshape(-1, *info.shape[1:])


def _decoded(header: Header, family: _Family, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's tensors in its own order, decoded one at a time."""
    import torch

    dtype = getattr(torch, config["dtype"])
    for name, (info, shape) in _places(header, config).items():
        if info.shape != shape:
            raise _inconsistent(header, f"`{info.name}` should be {list(shape)} and is {list(info.shape)}")
        value = _values(header, info)
        if family.rotary_pairs and ".attn_q." in info.name:
            value = _halves(value, config["num_attention_heads"])
        elif family.rotary_pairs and ".attn_k." in info.name:
            value = _halves(value, config["num_key_value_heads"])
        if family.norm_offset and info.name.endswith("norm.weight"):
            value = value.float() - family.norm_offset
        check_numbers(header.path, info.name, value)
        yield name, value.to(dtype)


def _places(header: Header, config: dict[str, Any]) -> dict[str, tuple[TensorInfo, tuple[int, ...]]]:
    """For every tensor of the model, where the file holds it and the shape that it must have."""
    import torch
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    from acc.model import build

    with torch.device("meta"):
        model = build(config)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        wanted = {name: shape for name, shape in wanted.items() if name not in model.all_tied_weights_keys}
    arch = next(key for key, value in MODEL_ARCH_NAMES.items() if value == header.architecture)
    names = get_tensor_name_map(arch, config["num_hidden_layers"])
    places = {}
    for name, shape in wanted.items():
        stem, _, suffix = name.rpartition(".")
        info = _info(header, f"{names.get_name(stem)}.{suffix}")
        places[name] = (_embedding(header)[0] if info.name == "token_embd.weight" else info, shape)
    used = {info.name for info, _ in places.values()} | {"token_embd.weight", "rope_freqs.weight"}
    used |= {"output.weight"} if config["tie_word_embeddings"] else set()
    if extra := sorted(header.tensors.keys() - used):
        raise _inconsistent(header, f"`{extra[0]}` has no place in a {config['model_type']} model of these sizes")
    return places


def _halves(value: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of Q or K per head from rotary pairs (x0 y0 x1 y1 ...) to Transformers' halves (x0 x1 ... y0 y1 ...)."""
    pairs = value.reshape(heads, -1, 2, *value.shape[1:])
    return pairs.transpose(1, 2).reshape(value.shape)


def _size(info: TensorInfo) -> int:
    return math.prod(info.shape)
