"""Calibration text: every kind of source, the split into parts, and what is said when there is too little of it."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from pyarrow import parquet

from acc.checkpoint import Checkpoint
from acc.corpus import Part, default_corpus, samples
from acc.diag import AccError
from acc.documents import documents

PARTS: tuple[Part, ...] = ("calibration", "scoring", "heldout")
CHAT = [{"role": "user", "content": "How are you?"}, {"role": "assistant", "content": "Well."}]
RENDERED = "<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\nWell.<|im_end|>\n"


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Callable[..., Path]) -> Any:
    return Checkpoint.at(tiny_model()).tokenizer()


def some_text(count: int = 200) -> list[str]:
    """Documents that no two share a line of."""
    return [
        f"Document {index}.\n" + "".join(f"Line {index * line} of it.\n" for line in range(40))
        for index in range(count)
    ]


def refused(tokenizer: Any, *sources: Path, **options: Any) -> str:
    with pytest.raises(AccError) as caught:
        samples(tokenizer, **{"count": 1, "length": 8, **options}, sources=sources)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.hint
    assert caught.value.exit_code == 2
    return f"{diagnostic.code}: {diagnostic.message}"


# Sources --------------------------------------------------------------------------------------------------------------


def test_rows_of_every_kind(tokenizer: Any, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"text": "plain", "other": 1},
        {"messages": CHAT},
        {"conversations": [{"from": "human", "value": "How are you?"}, {"from": "gpt", "value": "Well."}]},
        {"prompt": "2 + 2 =", "completion": " 4"},
        {"prompt": CHAT[:1], "completion": CHAT[1:]},
    ]
    expected = ["plain", RENDERED, RENDERED, "2 + 2 = 4", RENDERED]
    text = "\n\n".join(map(json.dumps, rows)) + "\n"
    (tmp_path / "a.jsonl").write_text(text)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "c.json").write_text(json.dumps(rows))
    for name in ("a.jsonl", "b.jsonl.gz", "c.json"):
        assert list(documents(tokenizer, [tmp_path / name])) == expected


@pytest.mark.parametrize(("column", "value", "expected"), [("text", "plain", "plain"), ("messages", CHAT, RENDERED)])
def test_parquet(column: str, value: Any, expected: str, tokenizer: Any, tmp_path: Path) -> None:
    table = pyarrow.table({"id": list(range(700)), column: [value] * 700})
    parquet.write_table(table, tmp_path / "x.parquet")
    assert list(documents(tokenizer, [tmp_path / "x.parquet"])) == [expected] * 700


def test_a_folder_of_text_and_code(tokenizer: Any, tmp_path: Path) -> None:
    for name, text in {"b.md": "two", "a/x.py": "one = 1", ".git/config": "hidden", "c.txt": "three"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "d.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "e.txt.gz").write_bytes(gzip.compress(b"four"))
    assert list(documents(tokenizer, [tmp_path])) == ["one = 1", "two", "three", "four"]


def test_bad_sources(tokenizer: Any, tmp_path: Path) -> None:
    assert refused(tokenizer, tmp_path / "nowhere") == "ACC130: there is no such file or folder of text."
    files: dict[str, bytes] = {
        "binary.bin": b"\0\1\2",
        "line.jsonl": b'{"text": "good"}\n{"text": ',
        "list.jsonl": b"[1, 2]\n",
        "x.parquet": b"PAR1 not really",
        "cut.jsonl.gz": gzip.compress(b'{"text": "' + b"a" * 99999 + b'"}')[:-20],
        "columns.jsonl": b'{"title": "x", "body": "y"}\n',
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    found = {name: refused(tokenizer, tmp_path / name) for name in files}
    assert found["binary.bin"] == "ACC131: it is neither text nor JSONL nor Parquet."
    assert found["line.jsonl"].startswith("ACC131: this line is not JSON (")
    assert found["list.jsonl"] == "ACC131: this line is not a JSON object."
    assert found["x.parquet"].startswith("ACC131: it is not a Parquet file that can be read (")
    assert found["cut.jsonl.gz"].startswith("ACC131: it cannot be read (")
    assert found["columns.jsonl"] == "ACC132: no text among the columns `title`, `body`."
    with pytest.raises(AccError, match=r"line\.jsonl:2: this line"):
        list(documents(tokenizer, [tmp_path / "line.jsonl"]))
    parquet.write_table(pyarrow.table({"question": ["a"], "answer": ["b"]}), tmp_path / "qa.parquet")
    assert refused(tokenizer, tmp_path / "qa.parquet") == "ACC132: no text among the columns `question`, `answer`."


def test_chats_that_the_template_does_not_take(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    tokenizer = Checkpoint.at(tiny_model()).tokenizer()
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": ["not a turn"]}))
    assert refused(tokenizer, tmp_path / "a.jsonl").startswith("ACC134: the model's chat template does not take this")
    tokenizer.chat_template = None
    assert "ACC134: the row is a chat and the model's tokenizer has no" in refused(tokenizer, tmp_path / "a.jsonl")


def titles(tokenizer: Any, tokens: torch.Tensor) -> set[str]:
    """The names of the documents that some samples are of."""
    return set(re.findall(r"Document \d+\.", tokenizer.decode(tokens.flatten())))


# Samples --------------------------------------------------------------------------------------------------------------


def test_samples_are_packed_and_repeatable(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in some_text()))
    options: dict[str, Any] = {"count": 20, "length": 64, "sources": [tmp_path / "x.jsonl"]}
    found = samples(tokenizer, **options)
    assert found.shape == (20, 64)
    assert found.dtype == torch.int64
    assert torch.equal(found, samples(tokenizer, **options))
    assert not torch.equal(found, samples(tokenizer, **options, seed=1))
    text = tokenizer.decode(found.flatten())
    assert text.startswith("Document ")
    assert "it.<|endoftext|>Document " in text  # documents follow each other, none is padded
    assert torch.equal(found[:7], samples(tokenizer, **{**options, "count": 7}))


@pytest.mark.parametrize("seed", [0, 1])
def test_the_parts_share_no_document(seed: int, tokenizer: Any, tmp_path: Path) -> None:
    texts = some_text()
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts + texts[:50]))
    seen: dict[str, set[str]] = {}
    for part in PARTS:
        found = samples(tokenizer, count=60, length=256, sources=[tmp_path / "x.jsonl"], part=part, seed=seed)
        seen[part] = titles(tokenizer, found)
        assert len(seen[part]) > 20
    assert not seen["calibration"] & seen["scoring"]
    assert not seen["calibration"] & seen["heldout"]
    assert not seen["scoring"] & seen["heldout"]


def test_one_long_file_serves_all_parts(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("\n\n".join(some_text()))
    found = [samples(tokenizer, count=40, length=128, sources=[tmp_path / "book.txt"], part=part) for part in PARTS]
    first, second, third = (titles(tokenizer, tokens) for tokens in found)
    assert min(map(len, (first, second, third))) > 3
    assert not first & second | first & third | second & third


def test_a_beginning_token_starts_every_sample(tokenizer: Any, tiny_model: Callable[..., Path]) -> None:
    from tokenizers import processors

    with_start = Checkpoint.at(tiny_model()).tokenizer()
    with_start.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    found = samples(with_start, count=5, length=32)
    assert found.shape == (5, 32)
    assert (found[:, 0] == 1).all()
    assert not (found[:, 1:] == 1).any()
    plain = samples(tokenizer, count=5, length=31)
    assert torch.equal(found[:, 1:], plain)


def test_too_little_text(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("Only a few words.")
    held = len(tokenizer("Only a few words.")["input_ids"]) + 1
    message = refused(tokenizer, tmp_path / "x.txt", count=2, length=512)
    assert message == (f"ACC133: the calibration part of the text holds {held} tokens; 2 samples of 512 need 1024.")
    assert "the heldout part of the text holds 0 tokens" in refused(tokenizer, tmp_path / "x.txt", part="heldout")
    with pytest.raises(AccError, match="or ask for at most 3 samples"):
        samples(tokenizer, count=9, length=held // 3, sources=[tmp_path / "x.txt"])
    (tmp_path / "empty.txt").write_text(" \n")
    assert "holds 0 tokens" in refused(tokenizer, tmp_path / "empty.txt")
    assert refused(tokenizer, length=0).startswith("ACC135")


# The default corpus ---------------------------------------------------------------------------------------------------


def test_the_default_corpus_may_be_shipped_and_is_large_enough(tokenizer: Any) -> None:
    assert default_corpus().stat().st_size < 1_100_000
    with gzip.open(default_corpus(), "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    assert {row["license"] for row in rows} == {"PSF-2.0", "CC-BY-SA-3.0", "CC-BY-SA-4.0"}
    stated = (default_corpus().parent / "SOURCES.md").read_text("utf-8")
    assert all(licence in stated for licence in ("PSF-2.0", "CC-BY-SA-3.0", "CC-BY-SA-4.0"))
    code = sum(len(row["text"]) for row in rows if row["source"].startswith("stdlib/"))
    assert 0.25 < code / sum(len(row["text"]) for row in rows) < 0.4
    # A vocabulary of 50,000 makes at least a token of every 6 characters; 64 K tokens must be in each part.
    for part in PARTS:
        characters = len(tokenizer.decode(samples(tokenizer, count=400, length=512, part=part).flatten()))
        assert characters > 6 * 32_768
