"""What one search works with: the parent in memory, samples to score on, and the parent with a narrower stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from acc.ir import Arch, ModelIR
from acc.passes.library import Library
from acc.passes.masked import Masked
from acc.passes.moments import Moments
from acc.passes.search.evolve import Picked
from acc.passes.search.scoring import Scorer
from acc.passes.search.space import sizes_of
from acc.passes.sequential import Sequential
from acc.passes.streaming import batches
from acc.passes.transform.slice import read_orders, with_kept
from acc.passes_api import Context


@dataclass
class Study:
    """The parent, and what is known of it.

    Attributes:
        scorer: on the scoring tokens; `checker` on others.
        libraries: of blocks, by the width of the stream.
        fit: samples for the refit behind a narrower stream.
    """

    ir: ModelIR
    masked: Masked
    moments: Moments
    orders: Mapping[str, Sequence[int]]
    scorer: Scorer
    checker: Scorer
    fit: torch.Tensor
    ctx: Context
    libraries: dict[int, Library] = field(default_factory=dict)

    @classmethod
    def of(
        cls, ir: ModelIR, ctx: Context, *, tokens: int, length: int, stride: int, fit: int, data: Sequence[str]
    ) -> Study:
        """Load the parent and the samples. `tokens` for scores, a quarter as many for the check, `fit` for refits."""
        from acc import checkpoint, corpus, model

        parent = ctx.path(ir.artifacts["parent"])
        tokenizer, sources = checkpoint.Checkpoint.at(parent).tokenizer(), [Path(path) for path in data]
        count = max(2, tokens // length)
        held = max(1, count // 4)
        scoring = corpus.samples(
            tokenizer, count=count + held, length=length, sources=sources, seed=ctx.seed, part="scoring"
        )
        fitting = corpus.samples(
            tokenizer, count=max(1, fit // length), length=length, sources=sources, seed=ctx.seed, part="calibration"
        )
        whole = ir.with_arch(Arch())
        masked = Masked(whole, model.load(parent, dtype=torch.float32))
        return cls(
            whole,
            masked,
            Moments.read(ctx.path(ir.artifacts["moments"])),
            read_orders(ctx.path(ir.artifacts["orders"])),
            Scorer(masked, scoring[:count], stride),
            Scorer(masked, scoring[count:], stride),
            fitting,
            ctx,
        )

    def library(self, hidden: int) -> Library:
        """The blocks of the parent, or of the parent refitted behind a narrower stream; made once."""
        if hidden not in self.libraries:
            self.libraries[hidden] = Library(self.masked, self.moments, self.orders, self._narrowed(hidden))
        return self.libraries[hidden]

    def kl(self, scorer: Scorer, picked: Picked, hidden: int) -> float:
        """KL in nats of a whole architecture."""
        library = self.library(hidden)
        values = library.base | library.values(sizes_of(self.ir, picked, self.ir.select("hidden")[0].size))
        return scorer.whole(values, {index for index, choice in enumerate(picked) if choice.dropped})

    def _narrowed(self, hidden: int) -> dict[str, torch.Tensor]:
        """The tensors of the parent with a narrower stream, every layer refitted in turn."""
        stream = self.ir.select("hidden")[0]
        if hidden == stream.size:
            return {}
        arch = with_kept(self.ir.with_arch(Arch({stream.name: hidden})), self.orders)
        plain = self.masked.cut(arch, self.moments)
        fit, check = batches(self.fit, 4), batches(self.checker.samples, 4)
        outcome = Sequential(self.masked, arch, plain, fit, check).run(self.ctx.progress)
        return plain | outcome.values
