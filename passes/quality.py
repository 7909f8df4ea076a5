"""How well models predict text, and how far one is from another: perplexity and KL divergence in PyTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from acc.passes_api import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Comparison:
    """Two models on the same text.

    Attributes:
        perplexity: of the parent and of the child: exp of the mean loss per predicted token.
        kl_nats: mean KL divergence of the child's next-token distribution from the parent's, per position.
        agreement: share of positions where both put the same token first.
        tokens: how many positions were judged.
    """

    perplexity: tuple[float, float]
    kl_nats: float
    agreement: float
    tokens: int


@torch.no_grad()
def compare(
    parent: PreTrainedModel, child: PreTrainedModel, batches: Sequence[torch.Tensor], progress: Progress
) -> Comparison:
    """Compare on samples [count, length], one batch's logits in memory at a time."""
    loss, divergence, same, judged = [0.0, 0.0], 0.0, 0, 0
    for number, tokens in enumerate(batches):
        progress(number, len(batches), "compare")
        wanted = tokens[:, 1:].flatten()
        rows = [log_probabilities(model, tokens) for model in (parent, child)]
        for at, row in enumerate(rows):
            loss[at] -= float(row.gather(1, wanted[:, None]).double().sum())
        divergence += float(kl(rows[0], rows[1]).double().sum())
        same += int((rows[0].argmax(-1) == rows[1].argmax(-1)).sum())
        judged += len(wanted)
    progress(len(batches), len(batches))
    return Comparison(
        (math.exp(loss[0] / judged), math.exp(loss[1] / judged)), divergence / judged, same / judged, judged
    )


def log_probabilities(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [batch * (length - 1), vocab] of the next tokens."""
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
    return torch.log_softmax(logits.flatten(0, 1).float(), -1)


def kl(parent: torch.Tensor, child: torch.Tensor) -> torch.Tensor:
    """KL(parent ‖ child) [rows] in nats of log-probabilities [rows, vocab]."""
    return (parent.exp() * (parent - child)).sum(-1)


@torch.no_grad()
def perplexity(model: PreTrainedModel, batches: Sequence[torch.Tensor]) -> float:
    """exp of the mean loss per predicted token over samples [count, length]."""
    total, judged = 0.0, 0
    for tokens in batches:
        rows, wanted = log_probabilities(model, tokens), tokens[:, 1:].flatten()
        total -= float(rows.gather(1, wanted[:, None]).double().sum())
        judged += len(wanted)
    return math.exp(total / judged)
