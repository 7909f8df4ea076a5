"""GGUF input: the folder made from a file is the model; a header is believed only after it has been checked."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_sample import write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from acc.checkpoint import Checkpoint, open_model
from acc.checkpoint.gguf_header import read_header
from acc.diag import AccError

TinyModel = Callable[..., Path]


def logits(folder: Path) -> torch.Tensor:
    from acc.model import load

    with torch.no_grad():
        found: torch.Tensor = load(folder)(torch.arange(0, 300, 7)[None], use_cache=False).logits
    return found


def refused(path: Path, cache: Path) -> str:
    with pytest.raises(AccError) as caught:
        open_model(str(path), cache)
    (diagnostic,) = caught.value.diagnostics
    assert caught.value.exit_code == 2
    assert diagnostic.hint
    assert not list(cache.glob("gguf/*"))  # nothing half-made
    return f"{diagnostic.code}: {diagnostic.message}"


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3", "phi3", "granite", "smollm3"])
def test_an_f32_file_gives_back_the_model_to_the_bit(family: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = tiny_model(family)
    found = open_model(str(write_gguf(folder, tmp_path / "m.gguf")), tmp_path / "cache")

    original = load_file(folder / "model.safetensors")
    assert set(found.names()) == set(original)
    for name, tensor in original.items():
        # Adding and taking away the 1 of Gemma's norms rounds once.
        assert torch.allclose(found.read(name), tensor, rtol=0, atol=1.2e-7 if family == "gemma3" else 0), name
    assert torch.allclose(logits(found.folder), logits(folder), rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # qwen3 files lose their head_dim in Transformers 5.24
def test_transformers_reads_the_same_weights_from_the_file(family: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, GgufConfig

    path = write_gguf(tiny_model(family), tmp_path / "m.gguf", "Q8_0")
    found = open_model(str(path), tmp_path / "cache")
    quantised = GgufConfig(dequantize=True, gguf_file=path.name)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32, quantization_config=quantised
    ).state_dict()
    for name in found.names():
        assert torch.equal(found.read(name), theirs[name]), name


def test_the_config_says_what_others_would_have_to_guess(tiny_model: TinyModel, tmp_path: Path) -> None:
    found = open_model(str(write_gguf(tiny_model("qwen3"), tmp_path / "m.gguf", "Q8_0")), tmp_path / "cache")
    expected = {
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 16,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
        "dtype": "float32",
        "vocab_size": 384,
    }
    assert {key: found.config_json[key] for key in expected} == expected
    assert found.config.num_hidden_layers == 4


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_the_rotary_scaling_of_llama_3_is_read_off_its_divisors(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = tiny_model("llama", head_dim=32, rope_parameters=LLAMA3)
    found = open_model(str(write_gguf(folder, tmp_path / "m.gguf")), tmp_path / "cache")
    assert found.config_json["rope_parameters"] == LLAMA3
    assert torch.equal(logits(found.folder), logits(folder))


def test_another_scaling_by_divisors_is_not_taken_for_that_of_llama_3(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = tiny_model("llama", head_dim=32, rope_parameters={**LLAMA3, "high_freq_factor": 8.0})
    path = write_gguf(folder, tmp_path / "m.gguf")
    assert "its rotary frequency factors are not those of the Llama 3.1 scaling" in refused(path, tmp_path / "c")


def test_linear_rotary_scaling(tiny_model: TinyModel, tmp_path: Path) -> None:
    keys = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    found = open_model(str(write_gguf(tiny_model(), tmp_path / "m.gguf", keys=keys)), tmp_path / "cache")
    assert found.config_json["rope_parameters"] == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize(("matrices", "dtype"), [("Q4_0", "F32"), ("F16", "F32"), ("F32", "F32")])
def test_numbers_are_kept_whole(matrices: str, dtype: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    # The norms of the F16 file have bits that float16 cannot hold, so its model is float32 too.
    found = open_model(str(write_gguf(tiny_model(), tmp_path / "m.gguf", matrices)), tmp_path / "cache")
    assert {found.dtype(name) for name in found.names()} == {dtype}


def test_a_bfloat16_file_stays_bfloat16(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = copied(tiny_model(), tmp_path / "bf16")
    weights = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    found = open_model(str(write_gguf(folder, tmp_path / "m.gguf", "BF16")), tmp_path / "cache")
    assert all(torch.equal(found.read(name), tensor) for name, tensor in weights.items())
    assert found.config_json["dtype"] == "bfloat16"


def test_the_tokenizer_is_the_models_own(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = tiny_model()
    found = open_model(str(write_gguf(folder, tmp_path / "m.gguf")), tmp_path / "cache")
    text = "def f(x):\n    return 12345 + x  # it's\t<|im_end|> Zoë 日本\n\n"
    ours, theirs = found.tokenizer(), Checkpoint.at(folder).tokenizer()
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert ours.decode(ours(text)["input_ids"]) == text
    assert ours.eos_token == "<|endoftext|>"
    assert ours.chat_template == theirs.chat_template
    side = json.loads((found.folder / "gguf_tokenizer.json").read_text())
    assert side["tokenizer.ggml.pre"] == "gpt-2"
    assert len(side["tokenizer.ggml.tokens"]) == 384
    assert side["types"]["tokenizer.ggml.eos_token_id"] == 4  # uint32


def test_digits_are_split_where_the_file_says_so(tiny_model: TinyModel, tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.pre": "smollm", "tokenizer.ggml.merges": ["1 2", "Ġ 1"], "tokenizer.ggml.tokens": None}
    tokens = json.loads((tiny_model() / "tokenizer.json").read_text())["model"]["vocab"]
    names = sorted(tokens, key=tokens.get)
    names[-2:] = ["12", "Ġ1"]
    keys["tokenizer.ggml.tokens"] = names
    for pre, expected in (("smollm", ["1", "2"]), ("gpt-2", ["12"])):
        path = write_gguf(tiny_model(), tmp_path / f"{pre}.gguf", keys={**keys, "tokenizer.ggml.pre": pre})
        tokenizer = open_model(str(path), tmp_path / "cache").tokenizer()
        assert tokenizer.convert_ids_to_tokens(tokenizer("12")["input_ids"]) == expected


def test_an_unknown_way_to_split_words_gives_no_tokenizer_rather_than_a_wrong_one(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    path = write_gguf(tiny_model(), tmp_path / "m.gguf", keys={"tokenizer.ggml.pre": "of-tomorrow"})
    found = open_model(str(path), tmp_path / "cache")
    with pytest.raises(AccError, match="tokenizer is of a kind that acc cannot rebuild"):
        found.tokenizer()


def test_a_tied_model_stored_at_both_ends_is_tied_to_the_finer_one(tiny_model: TinyModel, tmp_path: Path) -> None:
    import gguf

    folder = copied(tiny_model("qwen2"), tmp_path / "both")
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    coarse = gguf.dequantize(gguf.quantize(embedding.numpy(), kind := gguf.GGMLQuantizationType.Q4_0), kind)
    save_file(
        {**weights, "model.embed_tokens.weight": torch.from_numpy(coarse), "lm_head.weight": embedding},
        folder / "model.safetensors",
    )
    found = open_model(str(write_gguf(folder, tmp_path / "m.gguf")), tmp_path / "cache")
    assert found.config.tie_word_embeddings
    assert "lm_head.weight" not in found.names()
    assert found.shape("model.embed_tokens.weight") == tuple(embedding.shape)


def test_an_untied_model_stays_untied(tiny_model: TinyModel, tmp_path: Path) -> None:
    found = open_model(str(write_gguf(tiny_model("llama"), tmp_path / "m.gguf", "Q4_0")), tmp_path / "cache")
    assert not found.config.tie_word_embeddings
    assert "lm_head.weight" in found.names()


def test_a_file_is_decoded_once_per_content(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = write_gguf(tiny_model(), tmp_path / "m.gguf")
    first = open_model(str(path), tmp_path / "cache")
    made = (first.folder / "model.safetensors").stat().st_mtime_ns
    renamed = path.rename(tmp_path / "renamed.gguf")
    again = open_model(str(renamed), tmp_path / "cache")
    assert again.folder == first.folder
    assert (again.folder / "model.safetensors").stat().st_mtime_ns == made


def copied(folder: Path, to: Path) -> Path:
    import shutil

    return Path(shutil.copytree(folder, to))


# Bad files ------------------------------------------------------------------------------------------------------------


def test_not_gguf(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK" + bytes(100))
    assert refused(path, tmp_path / "c") == "ACC120: this is not a GGUF file."
    path.write_bytes(b"GGUF")
    assert "shorter than a GGUF header" in refused(path, tmp_path / "c")
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + bytes(99))
    assert "version 50331648 is not supported" in refused(path, tmp_path / "c")


@pytest.mark.parametrize(
    ("offset", "code", "value", "told"),
    [
        (8, "<Q", 1 << 60, "1152921504606846976 tensors are claimed"),
        (16, "<Q", 1 << 60, "1152921504606846976 metadata keys are claimed"),
        (24, "<Q", 1 << 62, "4611686018427387904 bytes of a metadata key are claimed"),
    ],
)
def test_absurd_counts_are_refused_before_anything_is_allocated(
    offset: int, code: str, value: int, told: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    path = write_gguf(tiny_model(), tmp_path / "m.gguf")
    raw = bytearray(path.read_bytes())
    struct.pack_into(code, raw, offset, value)
    path.write_bytes(raw)
    message = refused(path, tmp_path / "c")
    assert message.startswith("ACC121: the GGUF header is corrupt: ")
    assert told in message


def tensor_entry(raw: bytes | bytearray, name: bytes) -> int:
    """Where the dimensions of a tensor's entry begin."""
    return raw.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)


@pytest.mark.parametrize(
    ("at", "code", "value", "told"),
    [
        (0, "<I", 77, "tensor `token_embd.weight` has 77 dimensions"),
        (4, "<Q", 1 << 40, "tensor `token_embd.weight` (F32, shape [384, 1099511627776]) would lie in bytes"),
        (20, "<I", 99, "tensor `token_embd.weight` has the unknown type 99"),
        (20, "<I", 12, "tensor `token_embd.weight` of shape [384, 64] cannot be stored as Q4_K"),
        (24, "<Q", 1 << 50, "where it does not fit"),
    ],
)
def test_impossible_tensors(at: int, code: str, value: int, told: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    path = write_gguf(tiny_model(), tmp_path / "m.gguf")
    raw = bytearray(path.read_bytes())
    struct.pack_into(code, raw, tensor_entry(raw, b"token_embd.weight") + at, value)
    path.write_bytes(raw)
    message = refused(path, tmp_path / "c")
    assert message.startswith("ACC121")
    assert told in message


def test_a_truncated_file(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = write_gguf(tiny_model(), tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:-5000])
    assert "where it does not fit" in refused(path, tmp_path / "c")


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"embedding_length": 128}, "ACC124: the GGUF file contradicts itself: `token_embd.weight` should be"),
        ({"block_count": 3}, "ACC124: the GGUF file contradicts itself: `blk.3.attn_k.weight` has no place"),
        ({"block_count": 1 << 31}, "ACC124: the GGUF file contradicts itself: it states 2147483648 layers"),
        ({"block_count": "four"}, "ACC124: the GGUF file contradicts itself: `llama.block_count` is not a number."),
        ({"attention.head_count": 0}, "it states 0 heads and hidden size 64."),
        ({"attention.head_count_kv": 0}, "Transformers cannot build a model of its sizes ("),
        ({"context_length": None}, "`llama.context_length` is missing."),
        ({"feed_forward_length": [96, 96, 64, 96]}, "ACC123: `llama.feed_forward_length` differs from layer to layer"),
        (
            {"rope.scaling.type": "yarn"},
            "ACC123: it states rotary scaling of type `yarn`, which acc cannot carry over.",
        ),
        ({"expert_count": 8}, "ACC123: it states `llama.expert_count` = 8, which acc cannot carry over."),
        ({"split.count": 3}, "ACC122: this is one part of a split GGUF."),
        ({"tokenizer.ggml.eos_token_id": 9999}, "its eos_token_id is 9999, with 384 tokens."),
        ({"tokenizer.ggml.merges": ["no such"]}, "ACC124: the GGUF file contradicts itself: its tokenizer cannot be"),
    ],
)
def test_files_that_contradict_themselves_or_say_more_than_can_be_kept(
    keys: dict[str, Any], told: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    assert told in refused(write_gguf(tiny_model(), tmp_path / "m.gguf", keys=keys), tmp_path / "c")


def test_an_architecture_that_is_not_read(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = write_gguf(tiny_model(), tmp_path / "m.gguf")
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"\x05\x00\x00\x00\x00\x00\x00\x00llama", b"\x05\x00\x00\x00\x00\x00\x00\x00bloom", 1))
    assert "ACC122: GGUF files of architecture `bloom` are not read (known: gemma3, " in refused(path, tmp_path / "c")


def test_a_nan_in_the_file(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = copied(tiny_model(), tmp_path / "nan")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.2.mlp.up_proj.weight"][1, 3] = torch.nan
    save_file(weights, folder / "model.safetensors")
    message = refused(write_gguf(folder, tmp_path / "m.gguf"), tmp_path / "c")
    assert message == "ACC108: `blk.2.ffn_up.weight` holds nan at element 67 of 6144: the weights are broken."


@pytest.fixture(scope="module")
def small_file(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tiny_model(), tmp_path_factory.mktemp("fuzz") / "m.gguf").read_bytes()


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_damage_to_a_header_does_more_than_a_diagnostic(
    data: st.DataObject, small_file: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    raw = bytearray(small_file)
    header = tensor_entry(small_file, b"output_norm.weight") + 40
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header))
        raw[at : at + 8] = data.draw(st.sampled_from([bytes(8), b"\xff" * 8, b"\x7f" + bytes(7), b"\x01" + bytes(7)]))
    path.write_bytes(raw[: data.draw(st.sampled_from([len(raw), header, 100]))])
    try:
        found = read_header(path)
    except AccError:  # anything else is a failure of this test
        return
    assert all(info.start + info.bytes <= len(raw) for info in found.tensors.values())


# Real models ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_smollm2(smollm2: Path, tmp_path: Path) -> None:
    found = open_model(str(smollm2), tmp_path)
    assert sum(torch.Size(found.shape(name)).numel() for name in found.names()) == 134_515_008
    tokenizer = found.tokenizer()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, tokenize=False
    )
    assert "Paris" in answer(found, prompt)


@pytest.mark.slow
def test_qwen_coder_is_tied_although_its_file_stores_both_ends(qwen_coder: Path, tmp_path: Path) -> None:
    found = open_model(str(qwen_coder), tmp_path)
    assert sum(torch.Size(found.shape(name)).numel() for name in found.names()) == 494_032_768
    assert found.config.tie_word_embeddings
    assert "return a + b" in answer(found, "def add(a, b):\n")


def answer(checkpoint: Checkpoint, prompt: str) -> str:
    """What the model says next, greedily."""
    from acc.model import load

    tokenizer = checkpoint.tokenizer()
    tokens = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        made = load(checkpoint.folder).generate(tokens, max_new_tokens=24, do_sample=False)
    return str(tokenizer.decode(made[0, tokens.shape[1] :]))
