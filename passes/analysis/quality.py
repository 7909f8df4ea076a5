"""`quality`: what was lost, on text that nothing was calibrated or chosen on: perplexity, and KL from the parent."""

from __future__ import annotations

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
        batch: samples that run together.
    """

    name = "quality"
    kind = "analysis"
    needs = ("parent", "weights")
    reads = ("engine", "quant")

    tokens: int = 8192
    length: int = 512
    data: tuple[str, ...] = ()
    batch: int = 2

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
        import torch

        from acc import model
        from acc.passes.quality import compare
        from acc.passes.streaming import batches

        models = [model.load(folder, dtype=torch.float32) for folder in (parent, child)]
        found = compare(models[0], models[1], batches(samples, self.batch), ctx.progress)
        told = {"tokens": found.tokens, "text": "held-out text" + ("" if self.data else " of the default corpus")}
        before, after = found.perplexity
        rows = [{"what": f"child, {form}", "model": "child", "perplexity": after, "kl_nats": found.kl_nats}]
        if parent_too:
            rows.insert(0, {"what": f"parent, {form}", "model": "parent", "perplexity": before, "kl_nats": None})
        return [{**row, **told} for row in rows]
