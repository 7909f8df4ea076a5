"""The tokenizer that a GGUF file describes, as the files of a Hugging Face tokenizer.

The split patterns are those that llama.cpp applies for `tokenizer.ggml.pre` (src/llama-vocab.cpp): a wrong one still
gives valid tokens, but not those that the model was trained on, so an unknown name gives no tokenizer at all.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acc.checkpoint.gguf_header import Header, contradiction
from acc.checkpoint.writing import GGUF_TOKENIZER

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import PreTrainedTokenizerBase

_CONTROL, _USER_DEFINED = 3, 4
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2, _LLAMA3 = _WORDS % "", _WORDS % "{1,3}"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = {
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe", "dbrx", "pixtral"), _LLAMA3),
    "tekken": _TEKKEN,
}
_GPT2 = ("gpt-2", "default", "phi-2", "olmo", "jina-en", "granite-docling")
_GPT2_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""As GPT-2, after every digit has been split off."""
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")
"""A word that is in the vocabulary as it is is not merged."""


def write_tokenizer(header: Header, folder: Path) -> None:
    """Write tokenizer files, generation_config.json, and every `tokenizer.*` key as it was, for lowering to copy."""
    kept = {key: value for key, value in header.metadata.items() if key.startswith("tokenizer.")}
    types = {key: header.types[key] for key in kept}
    (folder / GGUF_TOKENIZER).write_text(json.dumps({**kept, "types": types}), "utf-8")
    (folder / "generation_config.json").write_text(json.dumps(_generation(header), indent=2) + "\n", "utf-8")
    try:
        tokenizer = _tokenizer(header)
    except Exception as error:  # a vocabulary that is not one fails anywhere in tokenizers
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise contradiction(header, f"its tokenizer cannot be built ({reason})") from error
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _generation(header: Header) -> dict[str, Any]:
    """The token ids that start, end and pad a text; a chat turn's end ends it too."""
    ids = {key: header.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos", "eot", "padding")}
    ends = [token for token in dict.fromkeys((ids["eos"], ids["eot"])) if token is not None]
    found = {"bos_token_id": ids["bos"], "eos_token_id": ends if len(ends) > 1 else (ends or [None])[0]}
    found["pad_token_id"] = ids["padding"]
    return {key: value for key, value in found.items() if value is not None}


def _tokenizer(header: Header) -> PreTrainedTokenizerBase | None:
    """A fast tokenizer, or None if the file has none or one of a kind that acc cannot rebuild faithfully."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    def stated(key: str) -> Any:
        return header.metadata.get(f"tokenizer.ggml.{key}")

    kind, tokens = stated("model"), stated("tokens")
    if kind == "llama":  # sentencepiece: Transformers rebuilds the merges from the scores
        return AutoTokenizer.from_pretrained(header.path.parent, gguf_file=header.path.name)
    split = _split(stated("pre") or "default")
    if kind != "gpt2" or not tokens or split is None:
        return None
    special = {
        f"{name}_token": tokens[stated(f"{key}_token_id")]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if stated(f"{key}_token_id") is not None and stated(f"{key}_token_id") < len(tokens)
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(header, split),
        chat_template=header.metadata.get("tokenizer.chat_template"),
        model_max_length=header.get("context_length"),
        clean_up_tokenization_spaces=False,
        **special,
    )


def _byte_level(header: Header, split: PreTokenizer) -> Tokenizer:
    """Byte-level BPE of the file's vocabulary and merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    def stated(key: str) -> Any:
        return header.metadata.get(f"tokenizer.ggml.{key}")

    tokens, pre = stated("tokens"), stated("pre")
    merges = [tuple(merge.split(" ", 1)) for merge in stated("merges") or ()]
    vocab = {token: index for index, token in enumerate(tokens)}
    built = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False, ignore_merges=pre in _WHOLE_WORDS))
    built.pre_tokenizer = split
    built.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        built.normalizer = normalizers.NFC()
    for token, kind in zip(tokens, stated("token_type") or (), strict=False):
        if kind in (_CONTROL, _USER_DEFINED):
            built.add_tokens([AddedToken(token, normalized=False, special=kind == _CONTROL)])
    if stated("add_bos_token") and stated("bos_token_id") is not None:
        bos = tokens[stated("bos_token_id")]
        built.post_processor = processors.TemplateProcessing(
            single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 {bos}:1 $B:1", special_tokens=[(bos, stated("bos_token_id"))]
        )
    return built


def _split(pre: str) -> PreTokenizer | None:
    """How text is split into words before merging; None for a name that is not known."""
    from tokenizers import Regex, pre_tokenizers

    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _GPT2:
        return gpt2
    if pre in _GPT2_DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    if pre not in _PATTERNS:
        return None
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERNS[pre]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
