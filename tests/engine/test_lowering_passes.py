"""The lowering passes: what they leave is loadable, what does not match is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import gguf
import pytest
import torch
from engine_files import cpu_target
from parity_models import BACKEND, TinyModel, context, logits, mean_kl, tokens_for, traced

from acc import model
from acc.checkpoint import Checkpoint, open_model, write
from acc.diag import AccError
from acc.ir import Artifact, ModelIR
from acc.passes.lowering.lower_gguf import LowerGGUF
from acc.passes.lowering.lower_hf import LowerHF
from acc.passes.lowering.quantize import Quantize
from acc.passes.lowering.verify import F16_KL, QUANTIZED_KL, ROUNDING_FACTOR, Verify
from acc.passes_api import Context
from acc.slicing import cut_tensors
from acc.trace import trace

WIDE = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "head_dim": 32}
UNEVEN = {"ffn.0": 512, "ffn.1": 256, "kv_group.1": 1, "mlp.3": 0, "attn.0": 0}


def cut(parent: Path, sizes: dict[str, int], folder: Path) -> ModelIR:
    """The parent cut to sizes, as `slice` leaves it."""
    ir = traced(parent).resize(sizes)
    write(folder, model.config_for(ir), cut_tensors(ir, Checkpoint.at(parent).read), like=parent)
    return ir.with_artifacts(weights=Artifact(str(folder), "weights"))


def for_quant(ctx: Context, quant: str) -> Context:
    return dataclasses.replace(ctx, target=dataclasses.replace(cpu_target(), quant=quant))


@pytest.fixture
def ctx(tmp_path: Path) -> Context:
    # Artifacts are named after the key: a store whose entry is the scratch folder itself.
    made = context(tmp_path / "store" / "key")
    return dataclasses.replace(made, store=tmp_path / "store", key="key")


def test_uniform_checkpoint_is_loaded_by_transformers_alone(
    tiny_model: TinyModel, tmp_path: Path, ctx: Context
) -> None:
    from transformers import AutoModelForCausalLM

    ir = cut(tiny_model("qwen2"), {"hidden": 48, **{f"ffn.{i}": 64 for i in range(4)}}, tmp_path / "weights")
    result = LowerHF().run(ir, ctx)
    assert result.facts["standard"] is True
    assert result.facts["parameters"] == ir.parameters()
    tokens = tokens_for(ir)
    loaded = AutoModelForCausalLM.from_pretrained(ctx.path(result.ir.artifacts["hf"])).eval()
    with torch.no_grad():
        found = loaded(tokens[None]).logits[0]
    assert mean_kl(logits(tmp_path / "weights", tokens), found) < 1e-9


def test_uneven_checkpoint_is_loaded_by_acc(tiny_model: TinyModel, tmp_path: Path, ctx: Context) -> None:
    ir = cut(tiny_model("qwen2", **WIDE), UNEVEN, tmp_path / "weights")
    result = LowerHF(dtype="bfloat16").run(ir, ctx)
    folder = ctx.path(result.ir.artifacts["hf"])
    assert result.facts["standard"] is False
    assert Checkpoint.at(folder).dtype("model.norm.weight") == "BF16"
    tokens = tokens_for(ir)
    assert 0 < mean_kl(logits(tmp_path / "weights", tokens), logits(folder, tokens)) < 0.05
    with pytest.raises(AccError, match="cannot write `int8`"):
        LowerHF(dtype="int8").run(ir, ctx)


def test_lower_quantize_verify(tiny_model: TinyModel, tmp_path: Path, ctx: Context) -> None:
    ctx = for_quant(ctx, "q4_k_m")
    sizes = {name: size for name, size in UNEVEN.items() if name != "kv_group.1"}  # 4 heads of 32 fill no block of 256
    ir = cut(tiny_model("llama", **WIDE), sizes, tmp_path / "weights")
    ir = LowerGGUF().run(ir, ctx).ir
    result = Quantize().run(ir, ctx)
    assert result.facts["host"] == "deci"
    assert result.facts["file_bytes"] == ctx.path(result.ir.artifacts["gguf"]).stat().st_size
    facts = Verify(samples=2, length=64).run(result.ir, ctx).facts
    assert facts["kl_nats"] <= F16_KL
    assert facts["greedy_match"] == 64
    assert facts["tokenizer_match"] is True
    assert facts["quantized_kl_nats"] <= facts["quantized_kl_limit_nats"]
    assert facts["quantized_kl_limit_nats"] == max(QUANTIZED_KL, ROUNDING_FACTOR * facts["rounding_kl_nats"])
    json.dumps(facts)  # the report stores them


def test_another_models_file_is_not_verified(tiny_model: TinyModel, tmp_path: Path, ctx: Context) -> None:
    ir = cut(tiny_model("llama"), {}, tmp_path / "weights")
    lowered = LowerGGUF().run(ir, ctx).ir
    torch.manual_seed(0)
    source = Checkpoint.at(tmp_path / "weights")
    noisy = ((name, source.read(name) + 0.003 * torch.randn(source.shape(name))) for name in source.names())
    write(tmp_path / "noisy", source.config_json, noisy, like=source.folder)
    changed = lowered.with_artifacts(weights=Artifact(str(tmp_path / "noisy"), "noisy"))
    with pytest.raises(AccError, match=r"mean KL .* nats per token, at most 1e-04") as error:
        Verify(samples=1, length=64).run(changed, ctx)
    assert error.value.diagnostics[0].code == "ACC352"


def test_another_tokenizer_is_not_verified(tiny_model: TinyModel, tmp_path: Path, ctx: Context) -> None:
    ir = cut(tiny_model("llama"), {}, tmp_path / "weights")
    lowered = LowerGGUF().run(ir, ctx).ir
    shutil.copytree(tmp_path / "weights", tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    tokenizer = json.loads(file.read_text("utf-8"))
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][10:]
    file.write_text(json.dumps(tokenizer), "utf-8")
    changed = lowered.with_artifacts(weights=Artifact(str(tmp_path / "other"), "other"))
    with pytest.raises(AccError, match="other tokens than Transformers") as error:
        Verify(samples=1, length=64).run(changed, ctx)
    assert error.value.diagnostics[0].code == "ACC354"


def test_digits_that_are_split_off_get_their_own_name_in_the_engine(
    tiny_model: TinyModel, tmp_path: Path, ctx: Context
) -> None:
    shutil.copytree(tiny_model("llama"), tmp_path / "parent")
    file = tmp_path / "parent" / "tokenizer.json"
    tokenizer = json.loads(file.read_text("utf-8"))
    digits = {"type": "Digits", "individual_digits": True}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, tokenizer["pre_tokenizer"]]}
    file.write_text(json.dumps(tokenizer), "utf-8")
    ir = LowerGGUF().run(cut(tmp_path / "parent", {}, tmp_path / "weights"), ctx).ir
    name = gguf.GGUFReader(ctx.path(ir.artifacts["gguf_f16"])).get_field("tokenizer.ggml.pre")
    assert name is not None
    assert name.contents() == "smollm"
    assert Verify(samples=1, length=64).run(ir, ctx).facts["tokenizer_match"] is True


def test_a_model_without_tokenizer_is_verified_on_random_tokens(
    tiny_model: TinyModel, tmp_path: Path, ctx: Context
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_model("llama") / name, bare)
    result = LowerGGUF().run(cut(bare, {}, tmp_path / "weights"), ctx)
    assert [note["code"] for note in result.facts["notes"]] == ["LC033"]
    facts = Verify(samples=1, length=64).run(result.ir, ctx).facts
    assert facts["tokenizer_match"] is None
    assert facts["kl_nats"] <= F16_KL


def test_fallbacks_that_a_cut_brings_are_refused(tiny_model: TinyModel, tmp_path: Path, ctx: Context) -> None:
    ctx = for_quant(ctx, "q4_k_m")
    parent = tiny_model("llama", **WIDE)
    cut_badly = cut(parent, {"ffn.0": 400}, tmp_path / "weights")
    told = r"1 tensors would silently become another type, such as blk.0.ffn_down.weight: F16, not Q4_K"
    with pytest.raises(AccError, match=told) as error:
        Quantize().run(cut_badly, ctx)
    assert error.value.diagnostics[0].code == "ACC351"
    facts = Quantize(allow_fallback=True).run(cut_badly, ctx).facts
    assert facts["fallbacks"] == [{"name": "blk.0.ffn_down.weight", "wanted": "Q4_K", "type": "F16"}]
    # What the parent's own sizes force is told and not refused.
    forced = cut(tiny_model("llama"), {"ffn.0": 64}, tmp_path / "small")
    assert "LC010" in {note["code"] for note in Quantize(type="q4_k_m").run(forced, ctx).facts["notes"]}


# Real models ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["q8_0", "q4_k_m"])
def test_smollm2(smollm2: Path, tmp_path: Path, ctx: Context, quant: str) -> None:
    parent = open_model(str(smollm2), tmp_path / "cache")
    ir = trace(parent.config).with_artifacts(weights=Artifact(str(parent.folder), "parent"))
    ir = LowerGGUF().run(ir, ctx).ir
    ir = Quantize(type=quant).run(ir, ctx).ir
    facts = Verify().run(ir, ctx).facts
    assert facts["kl_nats"] <= 3e-5
    assert facts["greedy_match"] == 64
    assert facts["tokenizer_match"] is True
    assert facts["quantized_tokenizer_match"] is True
    assert facts["quantized_kl_nats"] <= facts["quantized_kl_limit_nats"]


@pytest.mark.slow
def test_qwen_coder_from_gguf_to_gguf(qwen_coder: Path, tmp_path: Path, ctx: Context) -> None:
    """QKV biases, hidden 896 = 14 heads x 64, tied though its GGUF stores both ends; layers made uneven."""
    parent = open_model(str(qwen_coder), tmp_path / "cache")
    ir = trace(parent.config)
    assert ir.model_shape().tied
    sizes = {"ffn.3": 2560, "ffn.20": 4096, "kv_group.7": 1, "attn.11": 0, "mlp.16": 0, "layer.18": 0}
    ir = ir.resize(sizes)
    folder = tmp_path / "weights"
    write(folder, model.config_for(ir), cut_tensors(ir, parent.read), like=parent.folder)
    ir = ir.with_artifacts(weights=Artifact(str(folder), "weights"), parent=Artifact(str(parent.folder), "parent"))
    ir = LowerGGUF().run(ir, ctx).ir
    result = Quantize(type="q4_k_m", allow_fallback=True).run(ir, ctx)
    assert result.facts["host"] == "deci"
    facts = Verify(samples=2, length=128).run(result.ir, ctx).facts
    assert facts["kl_nats"] <= F16_KL
    assert facts["greedy_match"] == 64
    assert facts["tokenizer_match"] is True
    assert facts["quantized_kl_nats"] <= facts["quantized_kl_limit_nats"]
    assert BACKEND.plan(result.ir, "q4_k_m").file_bytes == ctx.path(result.ir.artifacts["gguf"]).stat().st_size
