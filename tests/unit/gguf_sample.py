"""A small writer of GGUF files for tests of GGUF input: what llama.cpp's converter does, for the tested families."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}
_GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def write_gguf(folder: Path, out: Path, matrices: str = "F32", keys: dict[str, Any] | None = None) -> Path:
    """Write the model of a Hugging Face folder as a GGUF file, its matrices in one ggml type, its vectors in F32.

    Args:
        keys: metadata to add or replace; None as a value leaves the key out.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(out, arch)
    metadata = _metadata(config, arch) | _tokenizer(folder) | (keys or {})
    for key, value in metadata.items():
        if value is not None:
            _add(writer, key if "." in key and key.split(".")[0] in ("tokenizer", "split") else f"{arch}.{key}", value)
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), config["num_hidden_layers"]
    )
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem, _, suffix = name.rpartition(".")
        value = tensor.float().numpy()
        if arch in ("llama", "granite", "smollm3") and stem.endswith(("q_proj", "k_proj")):
            heads = config["num_attention_heads" if stem.endswith("q_proj") else "num_key_value_heads"]
            value = value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        if arch == "gemma3" and stem.endswith("norm"):
            value = value + np.float32(1)
        kind = gguf.GGMLQuantizationType[matrices if value.ndim > 1 else "F32"]
        data = value if kind.name == "F32" else gguf.quantize(value, kind)
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", data, raw_dtype=kind)
    if config["rope_parameters"].get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _metadata(config: dict[str, Any], arch: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "rope.dimension_count": config["head_dim"],
    }
    rope = config["rope_parameters"]
    found["rope.freq_base"] = float(rope.get("full_attention", rope)["rope_theta"])
    if arch == "gemma3":
        found["attention.sliding_window"] = config["sliding_window"]
    if arch == "granite":
        found |= {key: float(config[name]) for key, name in _GRANITE.items()}
    return found


def _llama3_divisors(config: dict[str, Any]) -> np.ndarray:
    """By what llama.cpp divides each rotary frequency, as its converter computes it."""
    rope, found = config["rope_parameters"], []
    low, high, context = (
        rope[key] for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    for index in range(0, config["head_dim"], 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (index / config["head_dim"])
        smooth = (context / wavelength - low) / (high - low)
        if wavelength < context / high:
            found.append(1.0)
        elif wavelength > context / low:
            found.append(rope["factor"])
        else:
            found.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(found, np.float32)


def _tokenizer(folder: Path) -> dict[str, Any]:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    control = {token["id"] for token in tokenizer["added_tokens"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [token for token, _ in vocab],
        "tokenizer.ggml.token_type": [3 if index in control else 1 for _, index in vocab],
        "tokenizer.ggml.merges": [
            merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]
        ],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": (folder / "chat_template.jinja").read_text(),
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_uint32(key, value)
