"""What runs in the engine's child process: one model in PyTorch eager, float32, no KV cache."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from acc import model as models

_state: dict[str, Any] = {}


def load(source: Path | Mapping[str, Any], threads: int) -> None:
    """Load a Hugging Face folder, or build a model of a configuration with random weights (enough to time it)."""
    if threads:
        torch.set_num_threads(threads)
    _state["model"] = (models.load(source) if isinstance(source, Path) else models.build(source)).eval()
    _state["source"] = source


@torch.inference_mode()
def logits(tokens: Sequence[int]) -> np.ndarray:
    """Logits of every position, float32 [tokens, vocab]."""
    found: np.ndarray = _state["model"](torch.tensor([list(tokens)]), use_cache=False).logits[0].float().numpy()
    return found


def generate(tokens: Sequence[int], count: int) -> list[int]:
    """Greedy tokens; the whole sequence is computed anew for each."""
    known = list(tokens)
    for _ in range(count):
        known.append(int(logits(known)[-1].argmax()))
    return known[len(tokens) :]


def tokenize(text: str) -> list[int]:
    """Tokens of the folder's own tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(_state["source"])
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]


def seconds(prompt: int, output: int) -> tuple[float, float]:
    """One round: seconds to the first token, and seconds per token after it."""
    tokens = [index % 7 + 1 for index in range(prompt)]
    start = time.perf_counter()
    tokens += generate(tokens, 1)
    first = time.perf_counter()
    generate(tokens, output - 1)
    return first - start, (time.perf_counter() - first) / max(1, output - 1)


def memory(context: int) -> dict[str, int]:
    """Bytes of the parameters, and what a forward pass over the whole context adds to the process."""
    weights = sum(parameter.numel() * parameter.element_size() for parameter in _state["model"].parameters())
    process = psutil.Process(os.getpid())
    before = process.memory_info().rss
    logits([1] * context)
    compute = max(0, process.memory_info().rss - before)
    return {"weights": weights, "compute": compute, "total": weights + compute}
