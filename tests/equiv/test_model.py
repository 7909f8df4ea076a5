"""Uneven models: written, loaded, run with and without cache, traced again, and refused when something does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from masking import random_parent
from safetensors.torch import save_file
from tiny_configs import VARIANTS, traced
from transformers import AutoConfig, PretrainedConfig

from acc.diag import AccError
from acc.ir import Arch, ModelIR
from acc.model import build, config_for, decoder_layers, load
from acc.slicing import cut, cut_tensors
from acc.trace import trace

UNEVEN = Arch({"hidden": 15, "ffn.0": 7, "ffn.2": 5, "attn.0": 0, "kv_group.1": 1, "q_per_kv.2": 2, "mlp.2": 0})
PT = {"format": "pt"}
IDS = torch.arange(3, 12)[None]


def write(ir: ModelIR, folder: Path, shards: int = 1) -> Path:
    parent = random_parent(ir).float()
    (folder / "config.json").write_text(json.dumps(config_for(ir)))
    tensors = list(cut_tensors(ir, parent.state_dict().__getitem__))
    names = [f"model-{number}.safetensors" for number in range(shards)] if shards > 1 else ["model.safetensors"]
    for number, name in enumerate(names):
        save_file({key: value.contiguous() for key, value in tensors[number::shards]}, folder / name, PT)
    if shards > 1:
        index = {key: names[place % shards] for place, (key, _) in enumerate(tensors)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_uneven_model_is_written_loaded_and_generates(variant: str, tmp_path: Path) -> None:
    ir = traced(variant).with_arch(UNEVEN)
    model = load(write(ir, tmp_path, shards=2))
    assert sum(parameter.numel() for parameter in model.parameters()) == ir.parameters()
    tied = bool(traced(variant).config["tie_word_embeddings"])
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) is tied
    cached, uncached = (
        model.generate(IDS, max_new_tokens=6, do_sample=False, use_cache=use, eos_token_id=None, pad_token_id=0)
        for use in (True, False)
    )
    assert cached.shape == (1, 15)
    assert torch.equal(cached, uncached)


@pytest.mark.parametrize("variant", ["llama", "gemma3", "phi3"])
def test_an_uneven_model_is_traced_like_any_other(variant: str) -> None:
    ir = traced(variant).with_arch(UNEVEN)
    again = trace(read(config_for(ir)))
    assert again.model_shape() == ir.model_shape()
    assert again.parameters() == ir.parameters()
    assert config_for(again) == {**again.config, **config_for(ir)}


def read(config: dict[str, Any]) -> PretrainedConfig:
    """Read a configuration as Transformers does; the two that insist that heads divide the hidden size get one."""
    found: PretrainedConfig = AutoConfig.for_model(**{**config, "hidden_size": 24})
    found.hidden_size = config["hidden_size"]
    return found


def test_a_uniform_model_needs_nothing_but_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    sizes = {f"ffn.{i}": 9 for i in range(3)} | {f"q_per_kv.{i}": 2 for i in range(3)} | {"hidden": 16}
    ir = traced("llama").with_arch(Arch(sizes))
    folder = write(ir, tmp_path)
    assert "per_layer_config" not in config_for(ir)
    plain, ours = AutoModelForCausalLM.from_pretrained(folder).eval(), load(folder)
    with torch.no_grad():
        assert torch.equal(plain(IDS).logits, ours(IDS).logits)


def test_dropped_layers_take_their_entries_of_every_list_with_them() -> None:
    ir = traced("smollm3").with_arch(Arch({"layer.0": 0}))
    config = config_for(ir)
    assert config["num_hidden_layers"] == 2
    assert config["no_rope_layers"] == [0, 1]
    assert len(config["layer_types"]) == len(decoder_layers(build(config))) == 2
    with pytest.raises(AccError, match="has no layer left"):
        config_for(ir.with_arch(Arch({f"layer.{i}": 0 for i in range(3)})))


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.pop(name)


BAD_WEIGHTS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "missing": (drop("model.norm.weight"), r"ACC234.*tensors are missing: model\.norm\.weight"),
    "unexpected": (lambda t: t.update(extra=torch.ones(1)), r"ACC234.*tensors are not part of the model: extra"),
    "shape": (
        lambda t: t.update({"model.norm.weight": torch.ones(3)}),
        r"ACC233.*model\.norm\.weight: has shape \[3\], the configuration says \[15\]",
    ),
    "tied head that is not tied": (drop("lm_head.weight"), r"ACC234.*missing: lm_head\.weight"),
}


@pytest.mark.parametrize("name", BAD_WEIGHTS)
def test_weights_that_do_not_fit_are_refused(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    damage, message = BAD_WEIGHTS[name]
    folder = write(traced("llama").with_arch(UNEVEN), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(AccError, match=message):
        load(folder)


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AccError, match=r"ACC232.*no readable config\.json"):
        load(tmp_path)
    folder = write(traced("llama").with_arch(UNEVEN), tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(AccError, match=r"ACC107.*model\.safetensors: the file is truncated"):
        load(folder)
    file.unlink()
    with pytest.raises(AccError, match=r"ACC106.*the folder holds no weights"):
        load(folder)


def test_a_value_of_another_shape_is_not_cut() -> None:
    ir = traced("llama").with_arch(UNEVEN)
    with pytest.raises(AccError, match=r"ACC233.*has shape \[3\], the configuration says \[24\]"):
        cut(ir, ir.tensors["model.norm.weight"], torch.ones(3))
