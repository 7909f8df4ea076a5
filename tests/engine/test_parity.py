"""What the engine computes from a GGUF file of acc equals PyTorch, for every family and every way of cutting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity_models import BACKEND, Run, TinyModel, engine, logits, lower, mean_kl, tokens_for, traced

from acc.checkpoint import Checkpoint
from acc.diag import AccError
from acc.passes.lowering.verify import F16_KL, QUANTIZED_KL, ROUNDING_FACTOR

UNEVEN = {"ffn.0": 64, "ffn.1": 32, "kv_group.1": 1, "q_per_kv.2": 1}
"""Every layer of another shape."""


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with engine() as opened:
        yield opened


CASES: list[tuple[str, str, str, Mapping[str, int], Mapping[str, Any]]] = [
    # id, family, host, sizes, configuration
    ("llama", "llama", "llama", {}, {}),
    ("llama-tied", "llama", "llama", {}, {"tie_word_embeddings": True}),
    ("llama-hidden", "llama", "llama", {"hidden": 48}, {}),
    ("llama-uneven", "llama", "deci", UNEVEN, {}),
    ("llama-layer-gone", "llama", "deci", {**UNEVEN, "layer.2": 0}, {}),
    ("llama-first-layer-gone", "llama", "deci", {**UNEVEN, "layer.0": 0}, {}),
    *((f"llama-no-attention-{i}", "llama", "deci", {**UNEVEN, f"attn.{i}": 0}, {}) for i in (0, 2, 3)),
    *((f"llama-no-ffn-{i}", "llama", "deci", {**UNEVEN, f"mlp.{i}": 0}, {}) for i in (0, 2, 3)),
    ("llama-all", "llama", "deci", {**UNEVEN, "hidden": 48, "attn.0": 0, "mlp.1": 0, "layer.2": 0, "mlp.3": 0}, {}),
    ("llama-biases", "llama", "deci", {**UNEVEN, "attn.0": 0}, {"attention_bias": True}),
    ("mistral", "mistral", "deci", UNEVEN, {}),
    ("qwen2", "qwen2", "qwen2", {}, {}),
    ("qwen2-hidden", "qwen2", "deci", {"hidden": 48}, {}),
    ("qwen2-uneven", "qwen2", "deci", {**UNEVEN, "attn.0": 0, "mlp.3": 0}, {}),
    ("qwen3", "qwen3", "qwen3", {}, {}),
    ("qwen3-uneven", "qwen3", "openelm", {**UNEVEN, "attn.0": 0, "mlp.3": 0}, {}),
    ("qwen3-untied-padded", "qwen3", "qwen3", {**UNEVEN, "attn.2": 0}, {"tie_word_embeddings": False}),
    ("granite", "granite", "granite", {}, {}),
    ("granite-uneven", "granite", "deci", {**UNEVEN, "attn.3": 0}, {}),
    ("granite-untied-uneven", "granite", "deci", UNEVEN, {"tie_word_embeddings": False}),
    ("smollm3", "smollm3", "smollm3", {}, {}),
    ("smollm3-padded", "smollm3", "smollm3", {**UNEVEN, "mlp.3": 0}, {}),
    ("gemma3", "gemma3", "gemma3", {}, {}),
    ("gemma3-scale", "gemma3", "gemma3", {}, {"query_pre_attn_scalar": 40}),
    ("gemma3-padded", "gemma3", "gemma3", {**UNEVEN, "hidden": 48, "attn.4": 0}, {}),
    ("phi3", "phi3", "phi3", {}, {}),
    ("phi3-uneven", "phi3", "deci", {**UNEVEN, "attn.0": 0, "mlp.1": 0}, {}),
]


@pytest.mark.parametrize(("family", "host", "sizes", "config"), [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_f16_file_equals_pytorch(
    run: Run,
    tiny_model: TinyModel,
    tmp_path: Path,
    family: str,
    host: str,
    sizes: Mapping[str, int],
    config: Mapping[str, Any],
) -> None:
    made = lower(tiny_model(family, **config), sizes, "f16", tmp_path)
    tokens = tokens_for(made.ir)
    expected = made.pytorch(tokens)
    assert made.plan.host == host
    assert mean_kl(expected, run(made.file, tokens)) <= F16_KL
    # The test could fail: the model says something, and the same tokens in another order say something else.
    assert mean_kl(expected, made.pytorch(tokens.flip(0))) > 100 * F16_KL


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn-factor": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 1.3,
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_rope_scaling_is_carried(run: Run, tiny_model: TinyModel, tmp_path: Path, kind: str) -> None:
    plain = tiny_model("llama")
    made = lower(tiny_model("llama", rope_parameters=ROPES[kind]), UNEVEN, "f16", tmp_path)
    tokens = tokens_for(made.ir)
    assert mean_kl(made.pytorch(tokens), run(made.file, tokens)) <= F16_KL
    unscaled = lower(plain, UNEVEN, "f16", tmp_path / "plain")
    assert mean_kl(made.pytorch(tokens), run(unscaled.file, tokens)) > 10 * F16_KL


WIDE = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "head_dim": 32, "num_hidden_layers": 4}
WIDE_UNEVEN = {"ffn.0": 512, "ffn.1": 256, "kv_group.1": 1, "mlp.3": 0, "attn.0": 0}


@pytest.mark.parametrize("quant", ["q8_0", "q4_0", "q3_k_m", "q4_k_s", "q4_k_m", "q5_k_m", "q6_k"])
def test_quantized_file_equals_pytorch_with_its_own_weights(
    run: Run, tiny_model: TinyModel, tmp_path: Path, quant: str
) -> None:
    made = lower(tiny_model("llama", **WIDE), WIDE_UNEVEN, quant, tmp_path)
    tokens = tokens_for(made.ir)
    stored = made.dequantized(tokens, tmp_path / "stored")
    rounding = mean_kl(stored, made.imitated(tokens, tmp_path / "stored"))
    assert mean_kl(stored, run(made.file, tokens)) <= max(QUANTIZED_KL, ROUNDING_FACTOR * rounding)
    assert rounding < mean_kl(stored, stored.flip(0)) / 20  # so that this limit is a tight one
    assert mean_kl(made.pytorch(tokens), stored) > 0  # something was rounded


@pytest.mark.parametrize(("family", "config"), [("qwen3", {}), ("granite", {}), ("phi3", {}), ("gemma3", {})])
def test_reading_back_undoes_fusing_folding_and_padding(
    tiny_model: TinyModel, tmp_path: Path, family: str, config: Mapping[str, Any]
) -> None:
    made = lower(tiny_model(family, **config), {**UNEVEN, "mlp.2": 0}, "f16", tmp_path)
    tokens = tokens_for(made.ir)
    assert mean_kl(made.pytorch(tokens), made.dequantized(tokens, tmp_path / "stored")) <= F16_KL


def test_importance_changes_the_rounding_and_follows_the_cut(tiny_model: TinyModel, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    parent = tiny_model("llama", **WIDE)
    ir = traced(parent)
    moments = tmp_path / "moments"
    moments.mkdir()
    rng = np.random.default_rng(0)
    diagonals = {
        f"diag/{tensor.name}": rng.lognormal(0, 3, tensor_columns).astype(np.float32)
        for tensor in ir.tensors.values()
        if len(tensor.axes) == 2 and (tensor_columns := ir.axis_size(tensor.axes[-1]))
    }
    save_file(diagonals, moments / "moments.safetensors")
    plain = lower(parent, WIDE_UNEVEN, "q4_k_m", tmp_path / "plain")
    weighed = lower(parent, WIDE_UNEVEN, "q4_k_m", tmp_path / "weighed", moments)
    assert plain.file.stat().st_size == weighed.file.stat().st_size
    down = next(t for t in ir.tensors.values() if t.name.endswith("layers.1.mlp.down_proj.weight"))
    errors = {}
    for name, made in (("plain", plain), ("weighed", weighed)):
        stored = tmp_path / f"{name}-stored"
        BACKEND.dequantized(made.file, made.weights, stored, made.ir)
        difference = Checkpoint.at(stored).read(down.name) - Checkpoint.at(made.weights).read(down.name)
        weight = torch.from_numpy(diagonals[f"diag/{down.name}"][: difference.shape[1]])
        errors[name] = float((difference.double() ** 2 * weight).sum())
    assert errors["weighed"] < 0.8 * errors["plain"]


def test_a_layer_gone_that_shifts_a_pattern_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    for family, what in (("smollm3", "fourth layer"), ("gemma3", "sixth layer")):
        with pytest.raises(AccError, match=what):
            lower(tiny_model(family), {"layer.1": 0}, "f16", tmp_path / family)


def test_dequantized_folder_is_loaded_by_transformers_alone(tiny_model: TinyModel, tmp_path: Path) -> None:
    from parity_models import BACKEND
    from transformers import AutoModelForCausalLM

    made = lower(tiny_model("llama", **WIDE), {"hidden": 192}, "q8_0", tmp_path)
    BACKEND.dequantized(made.file, made.weights, tmp_path / "stored", made.ir)
    tokens = tokens_for(made.ir)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "stored").eval()
    with torch.no_grad():
        assert torch.allclose(loaded(tokens[None]).logits[0], logits(tmp_path / "stored", tokens), atol=1e-4)
