"""Calibration, scoring and held-out text as packed token samples, from the user's sources or the corpus inside acc."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from acc.diag import AccError
from acc.documents import documents

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

Part = Literal["calibration", "scoring", "heldout"]
_SHARES: tuple[Part, ...] = ("calibration", "calibration", "scoring", "heldout")
"""Half of the text is for calibration, a quarter each for scoring and for what is held out."""
_MOST_CHARS = 1 << 28
"""Text beyond this is not looked at, so that a corpus of any size can be pointed at."""


def samples(
    tokenizer: PreTrainedTokenizerBase,
    *,
    count: int,
    length: int,
    sources: Sequence[Path] = (),
    seed: int = 0,
    part: Part = "calibration",
) -> torch.Tensor:
    """Packed samples of one part of the text: int64 [count, length].

    Documents are shuffled, joined by the end-of-text token and cut into samples; each sample starts with the
    beginning-of-text token if the tokenizer adds one. The parts are disjoint whatever the seed; the same arguments
    give the same samples.

    Args:
        count: samples.
        length: tokens of each.
        sources: see `acc.documents.documents`; none for the default corpus, whose texts `acc/data/SOURCES.md` lists.
        seed: of the shuffle.
        part: calibration (half of the text), scoring or heldout (a quarter each).

    Raises:
        AccError: ACC130 to ACC134; ACC133 if there is not enough text.
    """
    import torch

    pieces = list(_of_part(documents(tokenizer, sources or [default_corpus()]), part))
    random.Random(seed).shuffle(pieces)
    start = _start(tokenizer)
    body = length - len(start)
    if count < 1 or body < 1:
        raise AccError.of("ACC135", part, f"{count} samples of {length} tokens cannot be made.", "ask for more")
    tokens: list[int] = []
    for piece in _tokenized(tokenizer, pieces):
        tokens += piece
        if len(tokens) >= count * body:
            break
    else:
        raise _too_short(sources, part, len(tokens), count, body)
    packed = torch.tensor(tokens[: count * body], dtype=torch.int64).reshape(count, body)
    return torch.cat([torch.tensor(start, dtype=torch.int64).expand(count, len(start)), packed], dim=1)


def default_corpus() -> Path:
    """The corpus inside acc: English and code, about 3 MB of text (`tools/make_calibration.py`)."""
    return Path(str(resources.files("acc"))) / "data" / "calibration.jsonl.gz"


def _of_part(texts: Iterable[str], part: Part) -> Iterator[str]:
    """The texts that belong to a part, each once; a text that is long beside the others is first cut into pieces.

    Of every four in the order of the sources, a hash of the text decides which go where: so the shares hold for small
    sources too, and a text that comes twice cannot be in two parts.
    """
    read = list(_up_to(texts, _MOST_CHARS))
    longest = min(max(sum(map(len, read)) // 64, 2_048), 65_536)
    unique = list(dict.fromkeys(piece for text in read for piece in _pieces(text, longest)))
    for at in range(0, len(unique), len(_SHARES)):
        group = sorted(unique[at : at + len(_SHARES)], key=_hash)
        yield from (piece for piece, owner in zip(group, _SHARES, strict=False) if owner == part)


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()


def _up_to(texts: Iterable[str], chars: int) -> Iterator[str]:
    for text in texts:
        yield text
        chars -= len(text)
        if chars < 0:
            return


def _pieces(text: str, longest: int) -> Iterator[str]:
    """A text in pieces of at most `longest` characters, cut at blank lines or else at line ends where there are any.

    Without it one long file would be a single document, and the parts could not be disjoint.
    """
    text = text.strip()
    while len(text) > longest:
        cut = longest
        for mark in ("\n\n", "\n", " "):
            if (found := text.rfind(mark, longest // 2, longest)) > 0:
                cut = found
                break
        yield text[:cut]
        text = text[cut:].strip("\n")
    if text:
        yield text


def _start(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that the tokenizer puts before any text, such as Llama 3's beginning-of-text."""
    plain, whole = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    place = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), 0)
    return list(whole[:place])


def _tokenized(tokenizer: PreTrainedTokenizerBase, pieces: Sequence[str]) -> Iterator[list[int]]:
    """The tokens of each piece and the end-of-text token, a few pieces at a time: no more than is needed."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for at in range(0, len(pieces), 16):
        batch = tokenizer(list(pieces[at : at + 16]), add_special_tokens=False, verbose=False)["input_ids"]
        yield from (list(tokens) + end for tokens in batch)


def _too_short(sources: Sequence[Path], part: Part, tokens: int, count: int, length: int) -> AccError:
    where = ", ".join(map(str, sources)) or "the default corpus"
    fits = tokens // length
    told = f"the {part} part of the text holds {tokens} tokens; {count} samples of {length} need {count * length}."
    more = f"give more text (about {4 * (count * length - tokens) // (2 if part == 'calibration' else 1)} tokens)"
    hint = more if not fits else f"{more}, or ask for at most {fits} samples"
    return AccError.of("ACC133", where, told, hint)
