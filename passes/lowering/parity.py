"""How alike an engine and PyTorch are: KL of the next-token distributions, greedy tokens, tokens of a text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from acc.diag import AccError

if TYPE_CHECKING:
    import numpy as np
    import torch

TIE_NATS = 0.01
"""Tokens whose log-probabilities PyTorch tells apart by less than this are a tie: F16 rounding may choose either."""

PROBE = (
    "Hello world! It's 3.14159 or 1,000,000?\n\n\tif (x != 0) { return x**2; }  # naïve café — “quotes” "
    "東京 привет 🙂🙃\r\n   trailing   spaces   \n\n\n1234567890 I'LL we've can't\u00a0nbsp\u200bzero"
)
"""Text on which tokenizers that are nearly right fall apart: digits, case, white space, scripts, emoji."""


@dataclass(frozen=True)
class Parity:
    """Mean and largest KL(PyTorch || engine) in nats per token."""

    mean: float
    largest: float


@dataclass(frozen=True)
class Greedy:
    """Greedy tokens that are PyTorch's own choice; `ties` of them differ from it by less than `TIE_NATS`."""

    matched: int
    same: bool
    ties: int
    gap_nats: float


def compare(expected: Sequence[np.ndarray], found: Iterable[np.ndarray]) -> Parity:
    """KL over all positions of all samples; logits [tokens, vocab] of each."""
    import torch

    parts = [kl(torch.from_numpy(p), torch.from_numpy(q)) for p, q in zip(expected, found, strict=True)]
    whole = torch.cat(parts)
    return Parity(float(whole.mean()), float(whole.max()))


def pytorch_logits(model: Any, tokens: Sequence[int]) -> np.ndarray:
    """Logits of every position of one sample, float32 [tokens, vocab]."""
    import torch

    with torch.no_grad():
        found: np.ndarray = model(torch.tensor([list(tokens)]), use_cache=False).logits[0].float().numpy()
    return found


def kl(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """KL(expected || found) per position, of logits [positions, vocab], in float64 and a few rows at a time."""
    import torch

    parts = []
    for one, other in zip(torch.split(expected, 32), torch.split(found, 32), strict=True):
        p, q = one.double().log_softmax(-1), other.double().log_softmax(-1)
        parts.append((p.exp() * (p - q)).sum(-1))
    return torch.cat(parts)


def greedy(
    reference: Any, generate: Callable[[Sequence[int], int], list[int]], prompt: torch.Tensor, count: int
) -> Greedy:
    """Whether the engine's greedy continuation is PyTorch's.

    PyTorch reads prompt and continuation at once: if it would choose every token after those before it, it would have
    generated the same.
    """
    import torch

    made = generate(prompt.tolist(), count)
    with torch.no_grad():
        text = torch.cat([prompt, torch.tensor(made)])
        log_p = reference(text[None], use_cache=False).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
    best = log_p.max(-1).values
    gaps = best - log_p.gather(-1, torch.tensor(made)[:, None])[:, 0]
    wrong = (gaps > TIE_NATS).nonzero()
    matched = int(wrong[0]) if len(wrong) else count
    ties = int((gaps[:matched] > 0).sum())
    return Greedy(matched, matched == count, ties, float(gaps[matched]) if matched < count else 0.0)


def same_tokens(tokenizer: Any, tokenize: Callable[[str], list[int]], tokens: torch.Tensor) -> bool:
    """True if the engine cuts the probe and the samples' text into the same tokens.

    Raises:
        AccError: ACC354 with the first difference.
    """
    texts = [PROBE, *(tokenizer.decode(sample, skip_special_tokens=True) for sample in tokens)]
    for text in texts:
        expected = tokenizer(text, add_special_tokens=False).input_ids
        found = tokenize(text)
        if found != expected:
            at = next((i for i, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), -1)
            told = (
                f"the engine cuts text into other tokens than Transformers, first at {_around(tokenizer, expected, at)}"
            )
            raise AccError.of(
                "ACC354", "tokenizer", told, "start from a GGUF of this model: its tokenizer is kept as it is"
            )
    return True


def _around(tokenizer: Any, tokens: list[int], at: int) -> str:
    return repr(tokenizer.decode(tokens[max(0, at - 3) : at + 4]))
