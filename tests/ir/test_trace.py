"""The trace: golden dumps per family, pinned ops, head layouts, and models that are not for acc."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tiny_configs import VARIANTS, config, traced

from acc.diag import AccError
from acc.trace import calls, trace
from acc.verify import verify

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from update_golden import golden  # type: ignore[import-not-found, unused-ignore]

variants = pytest.mark.parametrize("variant", VARIANTS)


@variants
def test_dims_and_tensors_are_the_golden_ones(variant: str) -> None:
    expected = (Path(__file__).parent / "golden" / f"{variant}.acc").read_text("utf-8")
    assert golden(variant) == expected, "if this is wanted, run tools/update_golden.py and review the diff"


@variants
def test_every_kind_of_dim_is_free(variant: str) -> None:
    ir = traced(variant)
    free = {dim.name for dim in ir.dims.values() if dim.state == "free"}
    per_layer = {f"{role}.{i}" for role in ("ffn", "kv_group", "q_per_kv", "layer", "attn", "mlp") for i in range(3)}
    assert free == {"hidden", "vocab"} | per_layer
    assert [dim.name for dim in ir.dims.values() if dim.state == "pinned"] == ["head_dim"]
    assert verify(ir) == []


@variants
def test_the_number_of_parameters_is_the_models_own(variant: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config(variant))
    assert traced(variant).parameters() == sum(parameter.numel() for parameter in model.parameters())


def test_an_op_without_a_rule_pins_what_it_touches_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(calls.RULES, "aten.silu.default")
    ir = trace(config("llama", num_hidden_layers=1))
    assert ir.dims["ffn.0"].state == "pinned"
    assert ir.dims["ffn.0"].why == "aten.silu.default in model.layers.0.mlp.act_fn: no rule for this op"
    assert ir.dims["hidden"].state == ir.dims["kv_group.0"].state == "free"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "q_rows", "k_rows"),
    [(4, 4, ("kv_group.0", "head_dim"), ("kv_group.0", "head_dim")), (4, 1, ("q_per_kv.0", "head_dim"), ("head_dim",))],
)
def test_one_query_per_key_head_and_one_key_head(
    heads: int, kv_heads: int, q_rows: tuple[str, ...], k_rows: tuple[str, ...]
) -> None:
    ir = trace(config("llama", num_hidden_layers=1, num_attention_heads=heads, num_key_value_heads=kv_heads))
    assert ir.tensors["model.layers.0.self_attn.q_proj.weight"].axes[0] == (q_rows,)
    assert ir.tensors["model.layers.0.self_attn.k_proj.weight"].axes[0] == (k_rows,)
    layer = ir.model_shape().layers[0]
    assert (layer.heads, layer.kv_heads) == (heads, kv_heads)
    assert verify(ir) == []


def test_a_hidden_size_that_a_number_of_the_code_depends_on_is_made_up_for_or_pinned() -> None:
    tied, untied = traced("gemma3"), traced("gemma3-untied")
    assert {t.name for t in tied.tensors.values() if t.rescale} == {"model.embed_tokens.weight", "model.norm.weight"}
    assert {t.name for t in untied.tensors.values() if t.rescale} == {"model.embed_tokens.weight"}
    from transformers import GPTNeoXConfig

    neox = trace(
        GPTNeoXConfig(vocab_size=40, hidden_size=24, intermediate_size=20, num_hidden_layers=1, num_attention_heads=6)
    )
    assert neox.dims["hidden"].state == "pinned"  # its head size follows from it
    assert "depends on the hidden size" in neox.dims["hidden"].why
    assert neox.dims["kv_group.0"].why.startswith("the configuration cannot say another size")
    assert neox.dims["ffn.0"].state == "free"


def test_parallel_branches_and_experts() -> None:
    from transformers import MixtralConfig, PhiConfig

    small = {"vocab_size": 40, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
    phi = trace(PhiConfig(**small, **heads))
    assert {phi.dims[name].state for name in ("layer.0", "attn.0", "mlp.0")} == {"free"}
    assert phi.tensors["model.layers.0.input_layernorm.weight"].presence == ("layer.0",)  # both branches read it
    experts = trace(MixtralConfig(**small, **heads, num_local_experts=4))
    assert experts.dims["hidden"].state == "pinned"
    with pytest.raises(AccError, match=r"ACC203.*mixtral: is not a dense decoder"):
        experts.model_shape()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("BertConfig", "bert: is an encoder or has no language model head"),
        ("T5Config", "t5: is an encoder-decoder, not a causal language model"),
        ("ViTConfig", "vit: Transformers has no causal language model of this type"),
        ("Gemma3Config", "gemma3: is a model of several media, not a text decoder"),
    ],
)
def test_other_models_are_refused(name: str, message: str) -> None:
    import transformers

    with pytest.raises(AccError, match="ACC202") as caught:
        trace(getattr(transformers, name)())
    assert message in str(caught.value)


def test_a_model_that_does_not_export_names_what_stopped_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    from transformers.models.llama.modeling_llama import LlamaMLP

    def forward(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    with pytest.raises(AccError, match="ACC201") as caught:
        trace(config("llama", num_hidden_layers=1))
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.where == "llama"
    assert diagnostic.message.startswith("the model does not export: op `aten.item.default` at `return x if x.sum()")
    assert "lowering and quantizing the whole model remain possible" in diagnostic.hint
    assert capsys.readouterr().err == ""
