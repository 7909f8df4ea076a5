"""`quality`: what was lost, on text that nothing was calibrated or chosen on: perplexity, and KL from the parent."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acc.ir import ModelIR
from acc.passes_api import Context, Pass, PassResult

if TYPE_CHECKING:
    import torch


class Quality(Pass):
    """Perplexity of the parent, of the child in float32, and of the child with the weights that its final file stores.

    Options:
        tokens: how many, in whole samples.
        length: tokens per sample.
        data: text, JSONL or Parquet files; the corpus inside the package if empty.
    """

    name = "quality"
    kind = "analysis"
    needs = ("parent", "weights")
    reads = ("engine", "quant")

    tokens: int = 8192
    length: int = 512
    data: tuple[str, ...] = ()

    def run(self, ir: ModelIR, ctx: Context) -> PassResult:
        """Nothing is compared where the vocabularies differ: a token then is not the same text."""
        (vocab,) = ir.select("vocab")
        if ir.size(vocab.name) != vocab.size:
            told = "perplexity and KL are not compared with the parent's, as the vocabulary was cut"
            return PassResult(ir, {"notes": [{"code": "ACC360", "where": "quality", "message": told, "level": "note"}]})
        from acc import corpus
        from acc.checkpoint import Checkpoint

        parent, child = (ctx.path(ir.artifacts[kind]) for kind in ("parent", "weights"))
        samples = corpus.samples(
            Checkpoint.at(parent).tokenizer(),
            count=max(1, self.tokens // self.length),
            length=self.length,
            sources=[Path(path) for path in self.data],
            seed=ctx.seed,
            part="heldout",
        )
        rows = [*self._rows("float32", parent, child, samples, ctx, parent_too=True)]
        if "gguf" in ir.artifacts and ctx.backend and ctx.target:
            stored = ctx.scratch / "stored"
            ctx.backend.dequantized(ctx.path(ir.artifacts["gguf"]), child, stored, ir)
            rows += self._rows(ctx.target.quant, parent, stored, samples, ctx)
            shutil.rmtree(stored)
        return PassResult(ir, {"quality": rows})

    def _rows(
        self, form: str, parent: Path, child: Path, samples: torch.Tensor, ctx: Context, *, parent_too: bool = False
    ) -> list[dict[str, Any]]:
        """Rows of the report (`acc.report.data.Quality`) for one form of the child."""
        loss, own_loss, kl_nats = self._compare(parent, child, samples, ctx, f"child in {form}")
        told = {"tokens": samples.numel(), "text": "held-out text" + ("" if self.data else " of the default corpus")}
        rows = [{"what": f"child, {form}", "model": "child", "perplexity": math.exp(own_loss), "kl_nats": kl_nats}]
        if parent_too:
            rows.insert(
                0, {"what": f"parent, {form}", "model": "parent", "perplexity": math.exp(loss), "kl_nats": None}
            )
        return [{**row, **told} for row in rows]

    def _compare(
        self, parent: Path, child: Path, samples: torch.Tensor, ctx: Context, what: str
    ) -> tuple[float, float, float]:
        """Mean loss of the parent, of the child, and mean KL(parent || child), nats per token, a sample at a time."""
        import torch

        from acc import model
        from acc.passes.lowering.parity import kl

        models = [model.load(folder, dtype=torch.float32) for folder in (parent, child)]
        sums = torch.zeros(3, dtype=torch.float64)
        for index, sample in enumerate(samples):
            ctx.progress(index, len(samples), what)
            with torch.inference_mode():
                logits = [one(sample[None], use_cache=False).logits[0, :-1] for one in models]
            losses = [torch.nn.functional.cross_entropy(one, sample[1:]) for one in logits]
            sums += torch.stack([*losses, kl(*logits).mean()]).double()
        loss, own_loss, kl_nats = (sums / len(samples)).tolist()
        return loss, own_loss, kl_nats
