"""How much a change hurts: KL divergence of the next token from the parent's; only the layers after it run again."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from acc.passes.masked import Masked
from acc.passes.quality import kl
from acc.passes.streaming import Stream


class Scorer:
    """The parent's hidden states and next-token distributions on some samples.

    Args:
        samples: token ids [count, length].
        stride: logits are compared at every so many positions; the vocabulary's product is dear.

    Attributes:
        tokens: that were spent on scores so far.
    """

    def __init__(self, masked: Masked, samples: torch.Tensor, stride: int) -> None:
        self.masked, self.samples = masked, samples
        self.stream = Stream(masked.model)
        self.positions = torch.arange(stride - 1, samples.shape[1], stride)
        self.entering = [self.stream.embed(samples)]
        for index in range(len(self.stream.layers)):
            self.entering.append(self.stream.layer(index, self.entering[-1]))
        self.parent = self._log_probabilities(self.entering[-1])
        self.tokens = 0

    def block(self, index: int, values: Mapping[str, torch.Tensor]) -> float:
        """KL in nats with some tensors of one layer replaced."""
        self.tokens += self.samples.numel()
        self.masked.put(values)
        hidden = self.stream.layer(index, self.entering[index])
        self.masked.restore(values)
        return self._kl(self.stream.run(hidden, index + 1))

    def without(self, index: int) -> float:
        """KL in nats with one layer left out."""
        self.tokens += self.samples.numel()
        return self._kl(self.stream.run(self.entering[index], index + 1))

    def whole(self, values: Mapping[str, torch.Tensor], dropped: Collection[int] = ()) -> float:
        """KL in nats of a whole model: some tensors replaced, some layers left out."""
        self.tokens += self.samples.numel()
        self.masked.put(values)
        hidden = self.stream.embed(self.samples)
        for index in range(len(self.stream.layers)):
            if index not in dropped:
                hidden = self.stream.layer(index, hidden)
        found = self._kl(hidden)
        self.masked.restore(values)
        return found

    def _kl(self, hidden: torch.Tensor) -> float:
        return float(kl(self.parent, self._log_probabilities(hidden)).double().mean())

    def _log_probabilities(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.stream.logits(hidden, self.positions)
        return torch.log_softmax(logits.flatten(0, 1).float(), -1)
