"""GGUF files that the engine tests write themselves: a small llama with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from acc.target import Device, Target, Workload

HEAD_DIM = 32


def cpu_target(workload: Workload | None = None, **options: Any) -> Target:
    """This machine's CPU with one thread (two wait for each other where others compute too), and engine options."""
    device = Device("here", "cpu", 0, 0.0, {}, "test", here=True, threads=1)
    return Target("test", device, "llamacpp", workload or Workload("test", 16, 4), engine_options=options)


def write_llama(
    path: Path,
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 2,
    kv_heads: int = 1,
    ffn: int = 128,
    vocab: int = 320,
    kind: str = "F16",
    tied: bool = False,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Write a llama without tokenizer (`tokenizer.ggml.model = none`) and return its tensors in float32.

    Args:
        kind: the ggml type of the matrices, one that gguf can quantise (F16, Q8_0, Q4_0...).
        tied: whether the embedding serves as output too.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(2048)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("none")
    shapes = {"token_embd.weight": (vocab, hidden), "output_norm.weight": (hidden,)}
    if not tied:
        shapes["output.weight"] = (vocab, hidden)
    for i in range(layers):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (hidden,),
            f"blk.{i}.attn_q.weight": (heads * HEAD_DIM, hidden),
            f"blk.{i}.attn_k.weight": (kv_heads * HEAD_DIM, hidden),
            f"blk.{i}.attn_v.weight": (kv_heads * HEAD_DIM, hidden),
            f"blk.{i}.attn_output.weight": (hidden, heads * HEAD_DIM),
            f"blk.{i}.ffn_norm.weight": (hidden,),
            f"blk.{i}.ffn_gate.weight": (ffn, hidden),
            f"blk.{i}.ffn_up.weight": (ffn, hidden),
            f"blk.{i}.ffn_down.weight": (hidden, ffn),
        }
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        norm = len(shape) == 1
        value = np.ones(shape) if norm else rng.normal(size=shape) / np.sqrt(shape[-1])
        tensors[name] = value.astype(np.float32)
        if norm:
            writer.add_tensor(name, tensors[name])
            continue
        stored = gguf.GGMLQuantizationType[kind]
        data = gguf.quants.quantize(tensors[name], stored)
        writer.add_tensor(name, data, raw_dtype=stored)
        tensors[name] = gguf.quants.dequantize(data, stored).reshape(shape).astype(np.float32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors.setdefault("output.weight", tensors["token_embd.weight"])
    return tensors


def reference_logits(tensors: dict[str, np.ndarray], tokens: list[int], *, heads: int, kv_heads: int) -> np.ndarray:
    """Logits of that model in numpy, float64 [tokens, vocab]: an implementation that knows nothing of the engine."""
    weights = {name: value.astype(np.float64) for name, value in tensors.items()}
    layers = sum(name.endswith("attn_q.weight") for name in weights)
    x = weights["token_embd.weight"][tokens]
    mask = np.triu(np.full((len(tokens), len(tokens)), -np.inf), 1)
    for i in range(layers):
        layer = {
            name.removeprefix(f"blk.{i}."): value for name, value in weights.items() if name.startswith(f"blk.{i}.")
        }
        normed = _norm(x)
        q = _rope((normed @ layer["attn_q.weight"].T).reshape(len(tokens), heads, HEAD_DIM))
        k = _rope((normed @ layer["attn_k.weight"].T).reshape(len(tokens), kv_heads, HEAD_DIM))
        v = (normed @ layer["attn_v.weight"].T).reshape(len(tokens), kv_heads, HEAD_DIM)
        k, v = (np.repeat(part, heads // kv_heads, axis=1) for part in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HEAD_DIM) + mask
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v).reshape(len(tokens), -1)
        x = x + mixed @ layer["attn_output.weight"].T
        normed = _norm(x)
        gate = normed @ layer["ffn_gate.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (normed @ layer["ffn_up.weight"].T)) @ layer["ffn_down.weight"].T
    logits: np.ndarray = _norm(x) @ weights["output.weight"].T
    return logits


def _norm(x: np.ndarray) -> np.ndarray:
    scaled: np.ndarray = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    return scaled


def _rope(x: np.ndarray) -> np.ndarray:
    """llama.cpp's NORM convention: neighbouring coordinates are a pair."""
    half = HEAD_DIM // 2
    angles = np.arange(len(x))[:, None, None] * 10000.0 ** (-np.arange(half) / half)
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = np.empty_like(x)
    turned[..., 0::2] = even * np.cos(angles) - odd * np.sin(angles)
    turned[..., 1::2] = even * np.sin(angles) + odd * np.cos(angles)
    return turned
