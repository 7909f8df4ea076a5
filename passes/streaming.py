"""A model run one decoder layer at a time over packed samples, for any family, with hidden states kept in between.

The model's own forward is what calls the layers: it runs once with every layer bypassed, which gives the embeddings
and the arguments of each layer (position embeddings, its own attention mask). From there layers are called one by one
with those arguments, so that a search recomputes only the layers after a change, and a calibration needs the
activations of one layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from acc.model import decoder_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class _Call:
    """What the model hands to one layer beside the hidden states."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class _Reached(Exception):
    """What was wanted of a layer is there."""


class Stream:
    """The decoder of a model, callable layer by layer. No gradients.

    Attributes:
        model: in eval mode.
        layers: its decoder layers, in order.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.layers = list(decoder_layers(model))
        self._calls: dict[tuple[int, ...], list[_Call]] = {}

    @torch.no_grad()
    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states [batch, length, hidden] that enter layer 0, for token ids [batch, length]."""
        entered: list[torch.Tensor] = []
        calls: list[_Call] = []

        def record(_: int, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            entered.append(hidden)
            calls.append(_Call(args, kwargs))
            return hidden

        with self._bypass(record):
            self.model(input_ids=tokens, use_cache=False, logits_to_keep=1)
        self._calls[tuple(tokens.shape)] = calls
        return entered[0]

    @torch.no_grad()
    def layer(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [batch, length, hidden] after layer `index`; `embed` must have seen a batch of this shape."""
        call = self._calls[tuple(hidden.shape[:2])][index]
        out = self.layers[index](hidden, *call.args, **call.kwargs)
        after: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return after

    def layer_until(
        self, index: int, hidden: torch.Tensor, module: nn.Module, whole: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The input [rows, in] of a module inside a layer, and what `layer` returns.

        Unless `whole`, nothing after that input is computed, and the input hidden states are returned.
        """
        found: list[torch.Tensor] = []

        def see(_: str, x: torch.Tensor) -> None:
            found.append(x)
            if not whole:
                raise _Reached

        with watch_inputs({"": module}, see), suppress(_Reached):
            hidden = self.layer(index, hidden)
        return found[0], hidden

    def run(self, hidden: torch.Tensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Hidden states after the layers from `start` up to, not including, `stop` (all of them if None)."""
        for index in range(start, len(self.layers) if stop is None else stop):
            hidden = self.layer(index, hidden)
        return hidden

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [batch, positions, vocab] of hidden states after the last layer; of all positions if None."""
        last = len(self.layers) - 1

        def inject(index: int, passing: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return hidden if index == last else passing

        keep: Any = 0 if positions is None else positions
        tokens = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        with self._bypass(inject):
            out = self.model(input_ids=tokens, use_cache=False, logits_to_keep=keep)
        logits: torch.Tensor = out.logits
        return logits

    @contextmanager
    def _bypass(self, instead: Callable[..., torch.Tensor]) -> Iterator[None]:
        """Call `instead(index, hidden, ...)` in the place of every layer."""

        def stand_in(index: int) -> Callable[..., torch.Tensor]:
            def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
                hidden = kwargs.pop("hidden_states") if "hidden_states" in kwargs else args[0]
                return instead(index, hidden, *args[1:], **kwargs)

            return forward

        for index, layer in enumerate(self.layers):
            layer.__dict__["forward"] = stand_in(index)
        try:
            yield
        finally:
            for layer in self.layers:
                del layer.__dict__["forward"]


@contextmanager
def watch_inputs(modules: Mapping[str, nn.Module], see: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
    """Call `see(name, input [rows, in])` whenever one of the modules runs."""

    def hook(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        return lambda _, args: see(name, args[0].reshape(-1, args[0].shape[-1]))

    handles = [module.register_forward_pre_hook(hook(name)) for name, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def watch_outputs(modules: Mapping[str, nn.Module], see: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
    """Call `see(name, output [rows, out])` whenever one of the modules has run."""

    def hook(name: str) -> Callable[[nn.Module, Any, torch.Tensor], None]:
        return lambda _, __, out: see(name, out.reshape(-1, out.shape[-1]))

    handles = [module.register_forward_hook(hook(name)) for name, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def batches(tokens: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Samples [count, length] in batches of `size` samples; the last one may be smaller."""
    return [tokens[start : start + size] for start in range(0, len(tokens), size)]
