"""Tiny models cut to an architecture and lowered, and what PyTorch and the engine say about them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from engine_files import cpu_target

from acc import model
from acc.backend_api import LoweringPlan
from acc.backends.llamacpp import LlamaCpp
from acc.backends.llamacpp.child import Child
from acc.backends.llamacpp.options import options_for
from acc.backends.llamacpp.session import LlamaSession
from acc.checkpoint import Checkpoint, write
from acc.ir import Artifact, ModelIR
from acc.passes.lowering.parity import kl, pytorch_logits
from acc.passes_api import Context
from acc.slicing import cut_tensors
from acc.trace import trace

BACKEND = LlamaCpp()

TinyModel = Callable[..., Path]
"""The fixture `tiny_model`."""


@functools.cache
def traced(folder: Path) -> ModelIR:
    """The IR of a model folder; tracing takes seconds, so once per folder."""
    ir = trace(Checkpoint.at(folder).config)
    return ir.with_artifacts(parent=Artifact(str(folder), "parent"), weights=Artifact(str(folder), "parent"))


def context(folder: Path) -> Context:
    """What a pass would be given, without a manager."""
    folder.mkdir(parents=True, exist_ok=True)
    return Context(folder, folder, "test", cpu_target(), BACKEND, 0, lambda step, total, what="": None)


@dataclass(frozen=True)
class Lowered:
    """A cut checkpoint and the file made of it."""

    ir: ModelIR
    weights: Path
    file: Path
    plan: LoweringPlan

    def pytorch(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [tokens, vocab] of the checkpoint in float32."""
        return logits(self.weights, tokens)

    def dequantized(self, tokens: torch.Tensor, scratch: Path) -> torch.Tensor:
        """Logits of PyTorch with the weights that the file stores."""
        BACKEND.dequantized(self.file, self.weights, scratch, self.ir)
        return logits(scratch, tokens)

    def imitated(self, tokens: torch.Tensor, stored: Path) -> torch.Tensor:
        """Logits of PyTorch with the weights in `stored`, its activations rounded as the engine rounds them."""
        loaded = model.load(stored)
        BACKEND.imitate(loaded, self.file, self.ir)
        return torch.from_numpy(pytorch_logits(loaded, tokens.tolist()))


def lower(parent: Path, sizes: Mapping[str, int], quant: str, out: Path, moments: Path | None = None) -> Lowered:
    """Cut the parent to `sizes` and lower it."""
    ir = traced(parent).resize(sizes)
    weights = out / "weights"
    if not weights.exists():
        write(weights, model.config_for(ir), cut_tensors(ir, Checkpoint.at(parent).read), like=parent)
    file = out / f"{quant}.gguf"
    return Lowered(ir, weights, file, BACKEND.lower(ir, weights, quant, file, context(out), moments))


def logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [tokens, vocab] of a Hugging Face folder in PyTorch."""
    with torch.no_grad():
        found: torch.Tensor = model.load(folder)(tokens[None], use_cache=False).logits[0]
    return found


def tokens_for(ir: ModelIR, count: int = 48) -> torch.Tensor:
    """Random tokens of the model's vocabulary."""
    return torch.randint(ir.model_shape().vocab, (count,), generator=torch.Generator().manual_seed(1))


Run = Callable[[Path, torch.Tensor], torch.Tensor]


@contextmanager
def engine(**options: Any) -> Iterator[Run]:
    """The engine's logits of a file, many files after one another in one process."""
    target = cpu_target(**options)
    info = BACKEND.engine(target)
    assert info is not None
    with Child(Path(info.path), timeout=120) as child:

        def run(file: Path, tokens: torch.Tensor) -> torch.Tensor:
            session = LlamaSession(child, info, file, options_for(target, context=128, batch=1))
            return torch.from_numpy(session.logits(tokens.tolist()))

        yield run


def mean_kl(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Mean KL in nats per token."""
    return float(kl(expected, found).mean())
