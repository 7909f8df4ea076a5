"""`evaluate`: perplexity of parent and child on held-out text, and the child's KL divergence from the parent."""

from __future__ import annotations

from pathlib import Path

import torch

from acc.ir import ModelIR
from acc.passes.quality import compare
from acc.passes.streaming import batches
from acc.passes_api import Context, Pass, PassResult


class Evaluate(Pass):
    """Both models in PyTorch, float32, on text that neither calibration nor search has seen.

    Options:
        tokens: how many, in whole samples.
        length: tokens per sample.
        data: text, JSONL or Parquet files; the corpus inside the package if empty.
        batch: samples that run together.
    """

    name = "evaluate"
    kind = "analysis"
    needs = ("parent", "weights")
    reads = ()

    tokens: int = 8192
    length: int = 512
    data: tuple[str, ...] = ()
    batch: int = 2

    def run(self, ir: ModelIR, ctx: Context) -> PassResult:
        from acc import checkpoint, corpus, model

        parent = ctx.path(ir.artifacts["parent"])
        samples = corpus.samples(
            checkpoint.Checkpoint.at(parent).tokenizer(),
            count=max(1, self.tokens // self.length),
            length=self.length,
            sources=[Path(path) for path in self.data],
            seed=ctx.seed,
            part="heldout",
        )
        models = [model.load(folder, dtype=torch.float32) for folder in (parent, ctx.path(ir.artifacts["weights"]))]
        found = compare(models[0], models[1], batches(samples, self.batch), ctx.progress)
        text = "held-out part of " + (", ".join(Path(path).name for path in self.data) or "the default corpus")
        quality = [
            {
                "what": f"{side}, float32 in PyTorch",
                "model": side,
                "perplexity": found.perplexity[at],
                "kl_nats": found.kl_nats if at else None,
                "tokens": found.tokens,
                "text": text,
            }
            for at, side in enumerate(("parent", "child"))
        ]
        facts = {
            "perplexity_parent": found.perplexity[0],
            "perplexity_child": found.perplexity[1],
            "kl_nats": found.kl_nats,
            "same_first_token": found.agreement,
            "tokens": found.tokens,
            "quality": quality,
        }
        return PassResult(ir, facts)
