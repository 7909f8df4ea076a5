"""Hugging Face folders in and out: what is accepted, how each bad one is refused, that writing is all or nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from acc.checkpoint import Checkpoint, open_model, write
from acc.diag import AccError

TinyModel = Callable[..., Path]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """A tiny llama that the test may change."""
    return Path(shutil.copytree(tiny_model(), tmp_path / "model"))


@pytest.fixture
def sharded(folder: Path, tmp_path: Path) -> Path:
    """The same model in several shards."""
    config = json.loads((folder / "config.json").read_text())
    write(tmp_path / "sharded", config, load_file(folder / SINGLE).items(), folder, shard_bytes=100_000)
    return tmp_path / "sharded"


def refused(model: Path | str, cache: Path) -> str:
    with pytest.raises(AccError) as caught:
        open_model(str(model), cache)
    (diagnostic,) = caught.value.diagnostics
    assert caught.value.exit_code == 2
    assert diagnostic.hint or diagnostic.code == "ACC107"
    return f"{diagnostic.code}: {diagnostic.message}"


def change(path: Path, **values: Any) -> None:
    """Change or (with None) remove entries of a JSON file."""
    loaded = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in loaded.items() if value is not None}))


# Reading --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3", "phi3", "granite", "smollm3"])
def test_a_folder_is_read_tensor_by_tensor(family: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    found = open_model(str(tiny_model(family)), tmp_path)
    original = load_file(tiny_model(family) / SINGLE)
    assert set(found.names()) == set(original)
    for name, tensor in original.items():
        assert torch.equal(found.read(name), tensor)
        assert found.shape(name) == tuple(tensor.shape)
        assert found.dtype(name) == "F32"
    assert found.config.hidden_size == 64


def test_shards_and_a_single_file_hold_the_same_model(folder: Path, sharded: Path, tmp_path: Path) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 3
    one, many = open_model(str(folder), tmp_path / "c"), open_model(str(sharded), tmp_path / "c")
    assert set(one.names()) == set(many.names())
    assert all(torch.equal(one.read(name), many.read(name)) for name in one.names())


def test_transformers_loads_what_is_written(folder: Path, sharded: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens = torch.arange(0, 200, 9)[None]
    with torch.no_grad():
        first, second = (AutoModelForCausalLM.from_pretrained(where)(tokens).logits for where in (folder, sharded))
    assert torch.equal(first, second)
    assert AutoTokenizer.from_pretrained(sharded).chat_template == AutoTokenizer.from_pretrained(folder).chat_template


def test_the_digest_follows_the_content_and_not_the_place(folder: Path, tmp_path: Path) -> None:
    first = Checkpoint.at(folder, tmp_path / "c").digest
    moved = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    assert Checkpoint.at(moved).digest == first
    assert Checkpoint.at(folder, tmp_path / "c").digest == first  # remembered
    for name, edit in (("config.json", {"rope_theta": 5}), ("tokenizer_config.json", {"x": 1})):
        change(moved / name, **edit)
        assert Checkpoint.at(moved, tmp_path / "c").digest != first
        shutil.copy(folder / name, moved)
    raw = bytearray((moved / SINGLE).read_bytes())
    raw[-1] ^= 1
    (moved / SINGLE).write_bytes(raw)
    assert Checkpoint.at(moved, tmp_path / "c").digest != first


def test_a_tied_head_may_be_stored_or_not(tiny_model: TinyModel, tmp_path: Path) -> None:
    tied = Path(shutil.copytree(tiny_model("qwen2"), tmp_path / "tied"))
    weights = load_file(tied / SINGLE)
    assert "lm_head.weight" not in open_model(str(tied), tmp_path / "c").names()
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, tied / SINGLE)
    assert "lm_head.weight" in open_model(str(tied), tmp_path / "c").names()


# Bad folders ----------------------------------------------------------------------------------------------------------


def test_not_a_folder(tmp_path: Path) -> None:
    assert refused(tmp_path / "nowhere", tmp_path) == "ACC101: there is no such folder or file."
    assert refused("./a/b/c", tmp_path) == "ACC101: there is no such folder or file."


def test_a_hub_id_without_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    message = refused("acc-tests/no-such-model", tmp_path)
    assert message == "ACC111: there is no such folder or file here, and the Hugging Face hub cannot be reached."


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    assert "ACC102: the folder has no config.json" in refused(tmp_path, tmp_path / "c")
    (tmp_path / "m.gguf").write_bytes(b"")
    with pytest.raises(AccError, match=r"did you mean .*m\.gguf\?"):
        open_model(str(tmp_path), tmp_path / "c")
    (tmp_path / "config.json").write_text('{"model_type": ')
    assert "ACC102: config.json cannot be read" in refused(tmp_path, tmp_path / "c")
    (tmp_path / "config.json").write_text("{}")
    assert "ACC102: config.json does not say the model_type." in refused(tmp_path, tmp_path / "c")


def test_a_missing_shard(sharded: Path, tmp_path: Path) -> None:
    lost = sorted(sharded.glob("*.safetensors"))[1]
    lost.unlink()
    assert refused(sharded, tmp_path) == "ACC106: this shard is named in the index but is not there."
    with pytest.raises(AccError, match=lost.name):
        open_model(str(sharded), tmp_path)


def test_no_weights_at_all(folder: Path, tmp_path: Path) -> None:
    (folder / SINGLE).unlink()
    assert "ACC106: the folder holds no weights" in refused(folder, tmp_path)


@pytest.mark.parametrize("keep", [-1, 100_000, 20, 8, 3, 0])
def test_a_truncated_shard(keep: int, folder: Path, tmp_path: Path) -> None:
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:keep])
    assert "ACC107: the file is truncated or not safetensors" in refused(folder, tmp_path)


def test_an_absurd_header_length(folder: Path, tmp_path: Path) -> None:
    raw = bytearray((folder / SINGLE).read_bytes())
    raw[:8] = (1 << 62).to_bytes(8, "little")
    (folder / SINGLE).write_bytes(raw)
    assert "ACC107: the file is truncated or not safetensors" in refused(folder, tmp_path)


def test_a_bad_index(sharded: Path, tmp_path: Path) -> None:
    original = json.loads((sharded / INDEX).read_text())
    (sharded / INDEX).write_text("[]")
    assert "ACC107: the index of the shards cannot be read" in refused(sharded, tmp_path)
    outside = dict.fromkeys(original["weight_map"], "../../secret.safetensors")
    (sharded / INDEX).write_text(json.dumps({"weight_map": outside}))
    assert "ACC107: the index names `../../secret.safetensors`" in refused(sharded, tmp_path)
    elsewhere = {**original["weight_map"], "lm_head.weight": original["weight_map"]["model.norm.weight"]}
    (sharded / INDEX).write_text(json.dumps({"weight_map": elsewhere}))
    message = refused(sharded, tmp_path)
    assert message == "ACC107: the index says that the file holds `lm_head.weight`, and it does not."


@pytest.mark.parametrize(("value", "told"), [(torch.nan, "nan"), (torch.inf, "inf"), (-torch.inf, "-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_broken_weights(value: float, told: str, dtype: torch.dtype, folder: Path, tmp_path: Path) -> None:
    weights = {name: tensor.to(dtype) for name, tensor in load_file(folder / SINGLE).items()}
    weights["model.layers.1.self_attn.k_proj.weight"][2, 7] = value
    save_file(weights, folder / SINGLE)
    expected = f"ACC108: `model.layers.1.self_attn.k_proj.weight` holds {told} at element 135 of 2048"
    assert refused(folder, tmp_path / "c") == f"{expected}: the weights are broken."
    assert refused(folder, tmp_path / "c")  # a failure is not remembered as a success


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"intermediate_size": 128}, "`model.layers.0.mlp.down_proj.weight` should be [64, 128] and is [64, 96]."),
        ({"num_hidden_layers": 5}, "`model.layers.4.self_attn.q_proj.weight` [64, 64] and 8 more are not there."),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, with 39 tensors."),
        ({"num_hidden_layers": 3}, "`model.layers.3.input_layernorm.weight` [64] has no place in the model."),
        (
            {"tie_word_embeddings": True},
            "`lm_head.weight` differs from `model.embed_tokens.weight`, with which it is said to be tied.",
        ),
    ],
)
def test_a_config_that_contradicts_the_weights(values: dict[str, Any], told: str, folder: Path, tmp_path: Path) -> None:
    change(folder / "config.json", **values)
    assert refused(folder, tmp_path) == f"ACC109: config.json contradicts the weights: {told}"


def test_a_config_that_no_model_can_be_built_of(folder: Path, tmp_path: Path) -> None:
    change(folder / "config.json", hidden_act="of-tomorrow")
    assert "ACC102: Transformers cannot build the model" in refused(folder, tmp_path)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt"])
def test_pickle_is_refused(file: str, folder: Path, tmp_path: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / file).write_bytes(b"\x80\x04.")
    assert "ACC105: the weights are pickle files" in refused(folder, tmp_path)
    assert "ACC105: the weights are pickle files" in refused(folder / file, tmp_path)


def test_code_that_comes_with_a_model_is_not_run(folder: Path, tmp_path: Path) -> None:
    (folder / "modeling_own.py").write_text("raise SystemExit('executed')")
    change(folder / "config.json", model_type="own", auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    assert refused(folder, tmp_path).startswith("ACC103: the model (`own`) brings its own Python code")
    change(folder / "config.json", auto_map=None)
    assert "does not know the model type `own`." in refused(folder, tmp_path)


def test_models_of_another_kind(folder: Path, tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM, T5Config

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertForMaskedLM(BertConfig(vocab_size=64, **sizes)).save_pretrained(tmp_path / "bert")
    message = refused(tmp_path / "bert", tmp_path / "c")
    assert message == "ACC104: this is not a causal language model (`BertForMaskedLM`)."
    T5Config(architectures=["T5ForConditionalGeneration"]).save_pretrained(tmp_path / "t5")
    assert "(`T5ForConditionalGeneration`)" in refused(tmp_path / "t5", tmp_path / "c")
    change(folder / "config.json", architectures=["LlamaForSequenceClassification"])
    assert "ACC104" in refused(folder, tmp_path / "c")


def test_quantised_weights(folder: Path, tmp_path: Path) -> None:
    change(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    assert refused(folder, tmp_path) == "ACC112: the weights are already quantised (gptq)."


def test_a_folder_without_tokenizer_opens_and_says_so_when_it_is_needed(folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink()
    found = open_model(str(folder), tmp_path)
    with pytest.raises(AccError, match=r"ACC110.*the folder has no tokenizer, which this step needs"):
        found.tokenizer()
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(AccError, match=r"ACC110.*the tokenizer cannot be loaded"):
        found.tokenizer()


# Writing --------------------------------------------------------------------------------------------------------------


def some_tensors(count: int = 4) -> Iterator[tuple[str, torch.Tensor]]:
    for index in range(count):
        yield f"t.{index}", torch.full((256, 256), float(index))


def test_every_number_format_comes_back(tmp_path: Path) -> None:
    tensors = {
        str(dtype): torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]).to(dtype)
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64)
    }
    tensors |= {"bool": torch.tensor([True, False]), "scalar": torch.tensor(3.5), "turned": torch.rand(4, 6).T}
    write(tmp_path / "out", {}, tensors.items(), None)
    found = Checkpoint.at(tmp_path / "out")
    assert found.names() == list(tensors) or set(found.names()) == set(tensors)
    for name, tensor in tensors.items():
        assert found.read(name).dtype == tensor.dtype
        assert torch.equal(found.read(name).double(), tensor.double())


def test_one_tensor_at_a_time_is_held(tmp_path: Path) -> None:
    import weakref

    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for index in range(20):
            tensor = torch.zeros(1000)
            alive.append(weakref.ref(tensor))
            yield f"t.{index}", tensor
            del tensor
            most = max(most, sum(ref() is not None for ref in alive))

    write(tmp_path / "out", {}, stream(), None, shard_bytes=10_000)
    assert most <= 1
    assert len(Checkpoint.at(tmp_path / "out").names()) == 20


def test_a_shard_is_no_larger_than_asked(tmp_path: Path) -> None:
    write(tmp_path / "out", {}, some_tensors(), None, shard_bytes=2 * 256 * 256 * 4)
    assert sorted(path.name for path in (tmp_path / "out").glob("*.safetensors")) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == 4 * 256 * 256 * 4


def test_nothing_is_left_when_the_tensors_fail(tmp_path: Path) -> None:
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from some_tensors(2)
        raise RuntimeError("midway")

    with pytest.raises(RuntimeError, match="midway"):
        write(tmp_path / "out", {}, failing(), None)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(AccError, match=r"ACC140.*it exists and is not empty"):
        write(tmp_path, {}, some_tensors(), None)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AccError, match=r"ACC501.*cannot write a model: (file exists|not a directory)"):
        write(tmp_path / "file" / "out", {}, some_tensors(), None)


FILL = """
import sys, torch
from pathlib import Path
from acc.checkpoint import write
from acc.diag import AccError
try:
    write(Path(sys.argv[1]) / "out", {}, ((f"t.{i}", torch.zeros(256, 256)) for i in range(16)), None)
except AccError as error:
    print(error)
print("left:", [path.name for path in Path(sys.argv[1]).iterdir()])
"""


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("size=2m", "ACC502]: {}: no space left on the disk to write a model"),
        ("size=2m,ro", "ACC501]: {}/out: cannot write a model: read-only file system"),
    ],
)
def test_a_full_and_a_read_only_disk(options: str, told: str, tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o {options} tmpfs {tmp_path}"
    try:
        if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode:
            pytest.skip("this machine does not let a user mount a tmpfs of their own")
    except FileNotFoundError:
        pytest.skip("no `unshare` here")
    script = f'{mount} && exec "$0" -c "$1" "$2"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, sys.executable, FILL, str(tmp_path)], capture_output=True, text=True
    )
    assert told.format(tmp_path) in done.stdout, done.stderr
    assert "left: []" in done.stdout
