"""No parity, no artifact: the files are loaded in the real engine and their logits compared with PyTorch's."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acc.diag import AccError
from acc.ir import ModelIR
from acc.passes.lowering.parity import Parity, compare, greedy, pytorch_logits, same_tokens
from acc.passes_api import Context, Pass, PassResult

if TYPE_CHECKING:
    import numpy as np
    import torch

    from acc.backend_api import Backend, Session
    from acc.checkpoint import Checkpoint
    from acc.target import Target

F16_KL, QUANTIZED_KL = 1e-4, 1e-3
"""Largest mean KL (nats per token) of the F16 file to PyTorch in float32, and of the final file to PyTorch with the
very weights that it stores, where the engine computes in floating point."""
ROUNDING_FACTOR = 1.5
"""Where the engine rounds activations too, the final file may differ by this many times what that rounding does in
PyTorch on the same text: it is noise of the same size and not the same noise."""
GREEDY_TOKENS = 64


class Verify(Pass):
    """Compare both files with PyTorch on text that nothing was calibrated or scored on.

    Options:
        samples, length: how much text, in samples of so many tokens.
    """

    name = "verify"
    kind = "lowering"
    needs = ("weights",)
    reads = ("device", "engine")
    samples: int = 4
    length: int = 256

    def run(self, ir: ModelIR, ctx: Context) -> PassResult:
        """Raises AccError: ACC352 for the F16 file, ACC353 for the final one, ACC354 for the tokenizer."""
        from acc.checkpoint import Checkpoint

        if ctx.backend is None or ctx.target is None:
            raise AccError.of("ACC350", "verify", "there is no engine to verify in", "name a target")
        weights = Checkpoint.at(ctx.path(ir.artifacts["weights"]))
        tokens = self._tokens(ir, weights, ctx.seed)
        check = _Check(ir, ctx, ctx.backend, ctx.target, weights, tokens)
        facts: dict[str, Any] = {"tokens": int(tokens.numel())}
        if "gguf_f16" in ir.artifacts:
            facts |= check.exact(ctx.path(ir.artifacts["gguf_f16"]))
        if "gguf" in ir.artifacts:
            facts |= check.quantized(ctx.path(ir.artifacts["gguf"]))
        if len(facts) == 1:
            raise AccError.of("ACC320", "verify", "there is no file to verify", "run lower-gguf or quantize before it")
        return PassResult(ir, facts | {"parity": _records(facts)})

    def _tokens(self, ir: ModelIR, weights: Checkpoint, seed: int) -> torch.Tensor:
        """Held-out text; random tokens for a model without a tokenizer. int64 [samples, length]."""
        import torch

        from acc import corpus

        length = min(self.length, int(ir.config.get("max_position_embeddings") or self.length))
        if _has_tokenizer(weights.folder):
            return corpus.samples(weights.tokenizer(), count=self.samples, length=length, seed=seed, part="heldout")
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(ir.model_shape().vocab, (self.samples, length), generator=generator)


class _Check:
    """One verification: what every comparison needs."""

    def __init__(
        self, ir: ModelIR, ctx: Context, backend: Backend, target: Target, weights: Checkpoint, tokens: torch.Tensor
    ) -> None:
        self.ir, self.ctx, self.backend, self.target = ir, ctx, backend, target
        self.weights, self.tokens = weights, tokens

    def exact(self, artifact: Path) -> dict[str, Any]:
        """The F16 file against the checkpoint in float32: logits, greedy tokens, and the tokenizer."""
        self.ctx.progress(0, 2, "F16 file against PyTorch")
        reference = self._pytorch(self.weights.folder)
        with self._open(artifact) as session:
            found = compare(self._logits(reference), map(session.logits, self.tokens.tolist()))
            chosen = greedy(reference, session.generate, self.tokens[0, :32], GREEDY_TOKENS)
            tokenizer = self._tokenizer(session)
        self._require(found, F16_KL, "ACC352", artifact, "PyTorch in float32")
        if not chosen.same:
            told = f"greedy tokens leave PyTorch's after {chosen.matched} of {GREEDY_TOKENS}"
            raise AccError.of("ACC352", artifact.name, f"{told}, by {chosen.gap_nats:.3f} nats", _HINT)
        return {
            "kl_nats": found.mean,
            "kl_max_nats": found.largest,
            "greedy_match": chosen.matched,
            "greedy_ties": chosen.ties,
            "tokenizer_match": tokenizer,
        }

    def quantized(self, artifact: Path) -> dict[str, Any]:
        """The final file against PyTorch with the dequantised weights, and what quantising itself cost."""
        self.ctx.progress(1, 2, "final file against PyTorch with its own weights")
        folder = self.ctx.scratch / "dequantized"
        self.backend.dequantized(artifact, self.weights.folder, folder, self.ir)
        try:
            model = self._pytorch(folder)
            expected = self._logits(model)
            with self._open(artifact) as session:
                found = compare(expected, map(session.logits, self.tokens.tolist()))
                tokenizer = self._tokenizer(session)
            # What the engine's rounding of activations brings about in PyTorch; nothing where it rounds none.
            self.backend.imitate(model, artifact, self.ir)
            rounding = compare(expected, self._logits(model)).mean
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        limit = max(QUANTIZED_KL, ROUNDING_FACTOR * rounding)
        self._require(found, limit, "ACC353", artifact, "PyTorch with the weights that it stores")
        return {
            "quantized_kl_nats": found.mean,
            "quantized_kl_max_nats": found.largest,
            "quantized_kl_limit_nats": limit,
            "rounding_kl_nats": rounding,
            "quantized_tokenizer_match": tokenizer,
        }

    def _logits(self, model: Any) -> list[np.ndarray]:
        return [pytorch_logits(model, sample) for sample in self.tokens.tolist()]

    def _open(self, artifact: Path) -> Any:
        context = max(self.tokens.shape[1], 32 + GREEDY_TOKENS)
        return self.backend.open(artifact, self.target, context=context)

    def _pytorch(self, folder: Path) -> Any:
        from acc import model

        return model.load(folder)

    def _tokenizer(self, session: Session) -> bool | None:
        """Whether the engine tokenizes like Transformers; None without a tokenizer."""
        if not _has_tokenizer(self.weights.folder):
            return None
        return same_tokens(self.weights.tokenizer(), session.tokenize, self.tokens)

    def _require(self, found: Parity, limit: float, code: str, artifact: Path, reference: str) -> None:
        if not found.mean <= limit:  # NaN fails too
            told = f"its logits differ from {reference}: mean KL {found.mean:.2e} nats per token, at most {limit:.0e}"
            raise AccError.of(code, artifact.name, told, _HINT)


def _records(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The facts as the report shows them: one record per file (`acc.report.data.Parity`)."""
    found: list[dict[str, Any]] = []
    if "kl_nats" in facts:
        greedy_tokens = {"greedy_match": facts["greedy_match"], "greedy_tokens": GREEDY_TOKENS}
        found.append({"artifact": "F16 file", "reference": "float32", "kl_nats": facts["kl_nats"], **greedy_tokens})
        found[-1]["kl_limit_nats"] = F16_KL
    if "quantized_kl_nats" in facts:
        found.append({"artifact": "final file", "reference": "float32, with the weights that the file stores"})
        found[-1] |= {"kl_nats": facts["quantized_kl_nats"], "kl_limit_nats": facts["quantized_kl_limit_nats"]}
    return [{**record, "tokens": facts["tokens"]} for record in found]


_HINT = "no bundle is made of it; please report the model's family and shape"


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
