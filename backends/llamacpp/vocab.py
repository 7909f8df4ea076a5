"""A tokenizer as GGUF metadata: verbatim where the model came as GGUF, else from `tokenizer.json`.

llama.cpp knows byte-level BPE by the *name* of a pre-tokenizer (`tokenizer.ggml.pre`), so the structure of the one in
`tokenizer.json` is looked up in a table of the expressions behind those names. That the choice is right is not
believed: `verify` compares the engine's tokens with those of Transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acc.diag import AccError

if TYPE_CHECKING:
    import gguf

VERBATIM = "gguf_tokenizer.json"
"""Side file that `acc.checkpoint` leaves in a folder made from a GGUF: its `tokenizer.*` entries."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+{}|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*{}|"
)
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

GPT2 = "<byte-level>"
"""Stands for the byte-level pre-tokenizer's own expression (GPT-2's)."""
DIGITS = "<digits>"
"""Stands for digits that are split off one by one."""

PRE: dict[tuple[str, ...], str] = {
    (GPT2,): "gpt-2",
    (DIGITS, GPT2): "smollm",
    (_CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _REST,): "smaug-bpe",  # llama-bpe if merges are ignored for whole words
    (_CONTRACTIONS + _WORDS + r"\p{N}" + _REST,): "qwen2",
    (_CASED.replace("{}", "") + r"\p{N}" + _CASED_REST,): "tekken",
    (_CASED.replace("{}", _SUFFIX) + r"\p{N}{1,3}" + _CASED_REST,): "gpt-4o",
}
"""Splitting steps of the pre-tokenizer, in order, and llama.cpp's name for them (src/llama-vocab.cpp)."""

_WHOLE_WORDS = {"smaug-bpe": "llama-bpe"}
"""The same expressions under a name whose engine looks whole words up before it merges (`ignore_merges`)."""


def add(writer: gguf.GGUFWriter, folder: Path | None, size: int) -> None:
    """Add the tokenizer of a Hugging Face folder to a file's metadata.

    Args:
        folder: with `gguf_tokenizer.json` or `tokenizer.json`; without either, or None, the file gets no tokenizer.
        size: rows of the embedding; missing tokens are padded as unused.

    Raises:
        AccError: LC030 for a kind of tokenizer, LC031 for a pre-tokenizer that llama.cpp does not know, LC032 for more
            tokens than rows.
    """
    if folder is not None and (folder / VERBATIM).is_file():
        _add_verbatim(writer, json.loads((folder / VERBATIM).read_text("utf-8")), folder, size)
    elif folder is not None and (folder / "tokenizer.json").is_file():
        _add_converted(writer, json.loads((folder / "tokenizer.json").read_text("utf-8")), folder, size)
    else:
        writer.add_tokenizer_model("none")


def has_tokenizer(folder: Path) -> bool:
    """Whether a GGUF made from this folder will hold a tokenizer."""
    return (folder / VERBATIM).is_file() or (folder / "tokenizer.json").is_file()


def _add_verbatim(writer: gguf.GGUFWriter, entries: Mapping[str, Any], folder: Path, size: int) -> None:
    import gguf

    tokens = entries.get("tokenizer.ggml.tokens", ())
    if len(tokens) != size:
        raise _wrong_size(folder, len(tokens), size)
    for key, number in entries["types"].items():
        kind = gguf.GGUFValueType(number)
        if not isinstance(entries[key], list):
            writer.add_key_value(key, entries[key], kind)
        elif entries[key]:
            writer.add_key_value(key, entries[key], gguf.GGUFValueType.ARRAY, sub_type=kind)


def _add_converted(writer: gguf.GGUFWriter, tokenizer: Mapping[str, Any], folder: Path, size: int) -> None:
    import gguf

    model = tokenizer["model"]
    byte_level = not model.get("byte_fallback") and any(True for _ in _steps(tokenizer.get("pre_tokenizer"), GPT2))
    if model.get("type") == "BPE" and byte_level:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre_name(tokenizer, folder))
    elif model.get("type") == "BPE" and model.get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_add_space_prefix(_prefixes_space(tokenizer))
    else:
        text = f"its tokenizer ({model.get('type')}) is neither byte-level BPE nor SentencePiece BPE with byte fallback"
        raise AccError.of("LC030", str(folder), text, "llama.cpp cannot tokenize for this model; serve it elsewhere")
    tokens, kinds = _tokens(tokenizer, size, folder)
    writer.add_token_list(tokens)
    if not byte_level:
        writer.add_token_scores(_scores(model, tokens))
    writer.add_token_types([int(kind) for kind in kinds])
    special = gguf.SpecialVocab(folder, load_merges=byte_level, n_vocab=size)
    special.add_special_token |= _framing(folder, special.special_token_ids)
    special.add_to_gguf(writer, quiet=True)


def pre_name(tokenizer: Mapping[str, Any], folder: Path) -> str:
    """llama.cpp's name for a byte-level pre-tokenizer, from its structure."""
    steps = tuple(_steps(tokenizer.get("pre_tokenizer"), GPT2))
    name = PRE.get(tuple(step for step in steps if step) or (GPT2,))
    if name is None:
        text = f"acc knows no llama.cpp pre-tokenizer that splits by {' then '.join(step for step in steps if step)}"
        raise AccError.of("LC031", str(folder), text, "start from a GGUF of this model: its tokenizer is kept verbatim")
    return _WHOLE_WORDS.get(name, name) if tokenizer["model"].get("ignore_merges") else name


def _steps(pre: Mapping[str, Any] | None, byte_level: str) -> Iterator[str]:
    """The splitting steps of a pre-tokenizer; "" for a byte-level step that only encodes."""
    if not pre:
        return
    kind = pre["type"]
    if kind == "Sequence":
        for inner in pre["pretokenizers"]:
            yield from _steps(inner, byte_level)
    elif kind == "ByteLevel":
        yield byte_level if pre.get("use_regex", True) else ""
    elif kind == "Digits":
        yield DIGITS if pre.get("individual_digits") else "<digit runs>"
    elif kind == "Split":
        yield str(pre["pattern"].get("Regex") or re.escape(pre["pattern"].get("String", "")))
    else:
        yield f"<{kind}>"


def _tokens(tokenizer: Mapping[str, Any], size: int, folder: Path) -> tuple[list[str], list[gguf.TokenType]]:
    import gguf

    by_id = {index: token for token, index in tokenizer["model"]["vocab"].items()}
    added = {entry["id"]: entry for entry in tokenizer.get("added_tokens", ())}
    by_id |= {index: entry["content"] for index, entry in added.items()}
    if max(by_id, default=-1) >= size:
        raise _wrong_size(folder, max(by_id) + 1, size)
    kinds = []
    for index in range(size):
        if index not in by_id:
            by_id[index] = f"[PAD{index}]"
            kinds.append(gguf.TokenType.UNUSED)
        elif index in added:
            kinds.append(gguf.TokenType.CONTROL if added[index].get("special") else gguf.TokenType.USER_DEFINED)
        elif re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", by_id[index]):
            kinds.append(gguf.TokenType.BYTE)
        else:
            kinds.append(gguf.TokenType.NORMAL)
    return [by_id[index] for index in range(size)], kinds


def _scores(model: Mapping[str, Any], tokens: list[str]) -> list[float]:
    """SentencePiece merges the pair whose union scores best; the rank of its first merge says the same."""
    rank: dict[str, int] = {}
    for index, merge in enumerate(model["merges"]):
        left, right = merge if isinstance(merge, list) else merge.split(" ", 1)
        rank.setdefault(left + right, index)
    return [float(-rank.get(token, len(rank) + index)) for index, token in enumerate(tokens)]


def _framing(folder: Path, special: Mapping[str, int]) -> dict[str, bool]:
    """Whether the tokenizer puts BOS before and EOS after a text, asked of the tokenizer itself."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("a", add_special_tokens=True).ids
    return {"bos": bool(ids) and ids[0] == special.get("bos"), "eos": len(ids) > 1 and ids[-1] == special.get("eos")}


def _prefixes_space(tokenizer: Mapping[str, Any]) -> bool:
    text = json.dumps([tokenizer.get("normalizer"), tokenizer.get("pre_tokenizer")])
    return '"Prepend"' in text or '"prepend_scheme": "first"' in text or '"prepend_scheme": "always"' in text


def _wrong_size(folder: Path, tokens: int, size: int) -> AccError:
    text = f"the tokenizer has {tokens} tokens, the embedding {size} rows"
    return AccError.of("LC032", str(folder), text, "the tokenizer must be cut with the vocabulary")
