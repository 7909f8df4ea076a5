"""What a lowering says before any compute: size to the byte, types, fallbacks, the grid, refusals."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from engine_files import cpu_target
from parity_models import BACKEND, TinyModel, lower, traced

from acc.backends.llamacpp import types
from acc.checkpoint import Checkpoint, open_model
from acc.ir import Artifact, ModelIR
from acc.trace import trace

WIDE = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "head_dim": 32}
UNEVEN = {"ffn.0": 512, "ffn.1": 256, "kv_group.1": 1, "mlp.3": 0, "attn.0": 0, "layer.2": 0}


@pytest.fixture(scope="module")
def smollm2_ir(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelIR:
    """The IR of SmolLM2-135M."""
    parent: Checkpoint = open_model(str(smollm2), tmp_path_factory.mktemp("cache"))
    return trace(parent.config).with_artifacts(parent=Artifact(str(parent.folder), "parent"))


@pytest.mark.parametrize("quant", ["f16", "q8_0", "q4_k_m"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "granite"])
def test_planned_size_is_the_written_size(tiny_model: TinyModel, tmp_path: Path, family: str, quant: str) -> None:
    parent = tiny_model(family, **WIDE)
    planned = BACKEND.plan(traced(parent).resize(UNEVEN), quant)
    made = lower(parent, UNEVEN, quant, tmp_path)
    assert made.file.stat().st_size == planned.file_bytes == made.plan.file_bytes
    assert planned.tensors == made.plan.tensors
    assert planned.bits_per_weight == made.plan.bits_per_weight


def test_types_follow_the_parents_layer_numbers(tiny_model: TinyModel) -> None:
    ir = traced(tiny_model("llama", **WIDE, num_hidden_layers=12))
    whole = {t.name: t.type for t in BACKEND.plan(ir, "q4_k_m").tensors}
    fewer = {t.name: t.type for t in BACKEND.plan(ir.resize({"layer.1": 0, "mlp.4": 0}), "q4_k_m").tensors}
    kept = [layer for layer in range(12) if layer != 1]
    kinds = ("attn_q", "attn_v", "attn_output", "ffn_up", "ffn_down")
    for number, layer in enumerate(kept):
        for kind in kinds:
            if (layer, kind[:3]) != (4, "ffn"):
                assert fewer[f"blk.{number}.{kind}.weight"] == whole[f"blk.{layer}.{kind}.weight"], (layer, kind)
    assert [whole[f"blk.{i}.ffn_down.weight"] for i in range(12)] == [
        *("Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q6_K", "Q6_K")
    ]  # as llama.cpp's own quantiser chooses for 12 layers


def test_fallbacks_are_those_of_llama_cpp() -> None:
    assert [types.stored("Q4_K", columns) for columns in (512, 384, 300)] == ["Q4_K", "Q5_0", "F16"]
    assert [types.stored("Q6_K", columns) for columns in (512, 384, 300)] == ["Q6_K", "Q8_0", "F16"]
    assert [types.stored("Q8_0", columns) for columns in (512, 384, 300)] == ["Q8_0", "Q8_0", "F16"]


def test_smollm2_says_that_180_of_272_tensors_fall_back(smollm2_ir: ModelIR) -> None:
    target = dataclasses.replace(cpu_target(), quant="q4_k_m")
    found = BACKEND.check(smollm2_ir, target)
    assert found.host == "llama"
    assert [str(note) for note in found.diagnostics] == [
        "warning[LC010]: q4_k_m: 180 of 272 tensors fall back at Q4_K_M because hidden 576 (150 tensors) and"
        " heads x head_dim 576 (30 tensors) are not multiples of 256: 6.17 bits per weight instead of 5.56\n\n"
        "hint: cut these dims to multiples of 256, or take a format of 32-column blocks such as q8_0 or q4_0"
    ]
    grid = found.grid
    assert (grid["hidden"].step, grid["ffn"].step, grid["kv_group"].step) == (256, 256, 1)
    assert not grid["ffn"].uniform
    fitting = BACKEND.check(smollm2_ir.resize({"hidden": 512}), target).diagnostics
    assert ["30 of 272 tensors fall back" in note.message for note in fitting] == [True]  # 9 heads of 64 stay
    assert not BACKEND.check(smollm2_ir, dataclasses.replace(target, quant="q8_0")).diagnostics


def test_padding_is_told_with_its_cost(tiny_model: TinyModel) -> None:
    padded = BACKEND.plan(traced(tiny_model("gemma3")).resize({"ffn.0": 32}), "f16")
    (note,) = [note for note in padded.notes if note.code == "LC003"]
    assert note.message.startswith("`gemma3` cannot hold this shape as it is: 12,288 zero weights (")
    assert note.level == "warning"
    held = BACKEND.plan(traced(tiny_model("llama")).resize({"mlp.0": 0}), "f16")
    (note,) = [note for note in held.notes if note.code == "LC003"]
    assert "`deci` cannot hold this shape as it is" in note.message


def test_what_no_host_holds_is_refused_with_a_way_out(tiny_model: TinyModel) -> None:
    ir = traced(tiny_model("smollm3")).resize({"layer.1": 0})
    found = BACKEND.check(ir, dataclasses.replace(cpu_target(), quant="f16"))
    (error,) = found.diagnostics
    assert (error.code, error.level) == ("LC002", "error")
    assert "every fourth layer" in error.message
    assert error.hint
    unknown = dataclasses.replace(ir, family="mamba")
    (error,) = BACKEND.check(unknown, cpu_target()).diagnostics
    assert error.code == "LC001"


def test_sliding_window_limits_the_announced_context(tiny_model: TinyModel, tmp_path: Path) -> None:
    import gguf

    made = lower(tiny_model("mistral", sliding_window=64), {}, "f16", tmp_path)
    assert [note.code for note in made.plan.notes] == ["LC005"]
    field = gguf.GGUFReader(made.file).get_field("llama.context_length")
    assert field is not None
    assert field.contents() == 64


def test_grid_of_a_family_without_an_uneven_host_is_uniform(tiny_model: TinyModel) -> None:
    grid = BACKEND.check(traced(tiny_model("smollm3")), cpu_target()).grid
    assert grid["ffn"].uniform
    assert grid["attn"].minimum == 1
    assert not BACKEND.check(traced(tiny_model("qwen3")), cpu_target()).grid["ffn"].uniform
    assert BACKEND.check(traced(tiny_model("qwen3", tie_word_embeddings=False)), cpu_target()).grid["ffn"].uniform
