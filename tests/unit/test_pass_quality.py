"""`quality` against loss and KL computed here, on a child that is worse than its parent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from acc import corpus
from acc.checkpoint import Checkpoint
from acc.ir import Artifact, ModelIR
from acc.passes.analysis.quality import Quality
from acc.passes_api import Context
from acc.trace import trace


@pytest.fixture
def pair(tiny_model: Callable[..., Path], tmp_path: Path) -> tuple[ModelIR, Path, Path]:
    """A parent, and a child that is the parent with noise on every weight."""
    parent, child = tiny_model("llama"), tmp_path / "child"
    model = AutoModelForCausalLM.from_pretrained(parent)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(child)
    ir = trace(AutoConfig.from_pretrained(parent))
    artifacts = {"parent": Artifact(str(parent), "p"), "weights": Artifact(str(child), "c")}
    return ir.with_artifacts(**artifacts), parent, child


def context(folder: Path) -> Context:
    return Context(folder, folder, "key", None, None, 0, lambda step, total, what="": None)


def test_rows_are_perplexity_and_kl_on_held_out_text(pair: tuple[ModelIR, Path, Path], tmp_path: Path) -> None:
    ir, parent, child = pair
    result = Quality(tokens=128, length=64).run(ir, context(tmp_path))
    assert result.ir is ir
    tokens = corpus.samples(Checkpoint.at(parent).tokenizer(), count=2, length=64, part="heldout")
    with torch.inference_mode():
        logits = [AutoModelForCausalLM.from_pretrained(folder)(tokens).logits[:, :-1] for folder in (parent, child)]
    log_p, log_q = (one.double().log_softmax(-1) for one in logits)
    losses = [-one.gather(-1, tokens[:, 1:, None]).mean() for one in (log_p, log_q)]
    expected_kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    before, after = result.facts["quality"]
    assert before["kl_nats"] is None
    assert before["perplexity"] == pytest.approx(float(losses[0].exp()), rel=1e-4)
    assert after["perplexity"] == pytest.approx(float(losses[1].exp()), rel=1e-4)
    assert after["kl_nats"] == pytest.approx(float(expected_kl), rel=1e-4)
    assert after["kl_nats"] > 0.001, "the noise must show"
    assert (before["tokens"], after["tokens"]) == (126, 126), "the first token of a sample is not predicted"


def test_another_vocabulary_is_not_compared(pair: tuple[ModelIR, Path, Path], tmp_path: Path) -> None:
    ir, _, _ = pair
    (vocab,) = ir.select("vocab")
    facts = Quality().run(ir.resize({vocab.name: vocab.size - 32}), context(tmp_path)).facts
    assert "quality" not in facts
    assert [note["code"] for note in facts["notes"]] == ["ACC360"]
