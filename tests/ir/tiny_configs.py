"""Tiny configurations of every family, and their IRs, traced once a session."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from acc.ir import ModelIR

if TYPE_CHECKING:
    from transformers import PretrainedConfig

BASE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Sizes that coincide with one another (24 = 6 heads of 4) on purpose: only the structure may tell dims apart."""

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied-biased": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
    "gemma3": {
        "model_type": "gemma3_text",
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 5,
        "query_pre_attn_scalar": 4,
    },
    "gemma3-untied": {
        "model_type": "gemma3_text",
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 5,
        "query_pre_attn_scalar": 4,
        "tie_word_embeddings": False,
    },
    "phi3": {"model_type": "phi3"},
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
        "logits_scaling": 2.0,
    },
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0, 1]},
}


def config(variant: str, **changes: Any) -> PretrainedConfig:
    """The configuration of a variant, some keys changed."""
    from transformers import AutoConfig

    values = {**BASE, **VARIANTS[variant], **changes}
    made: PretrainedConfig = AutoConfig.for_model(values.pop("model_type"), **values)
    return made


@functools.cache
def traced(variant: str) -> ModelIR:
    """The IR of a variant."""
    from acc.trace import trace

    return trace(config(variant))
