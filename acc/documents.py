"""Text sources: text files, folders, JSONL and Parquet become plain documents, chats through the model's template."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from acc.diag import AccError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = Mapping[str, Any]
_COLUMNS = "`text`, `messages`, `conversations`, or `prompt` and `completion`"
_SHAREGPT = {"human": "user", "gpt": "assistant"}


def documents(tokenizer: PreTrainedTokenizerBase, sources: Sequence[Path]) -> Iterator[str]:
    """The documents of the sources, in the order given, folders in the order of their paths.

    Args:
        tokenizer: its chat template renders rows of messages.
        sources: .jsonl, .json and .parquet files, any other file as text (each also as .gz), or folders of them, in
            which hidden and binary files are passed over.

    Raises:
        AccError: ACC130 to ACC132, ACC134: a source that is not there, cannot be read, or whose columns are not known.
    """
    for source in sources:
        if source.is_dir():
            for path in sorted(source.rglob("*")):
                hidden = any(part.startswith(".") for part in path.relative_to(source).parts)
                if path.is_file() and not hidden and not _binary(path):
                    yield from _file(tokenizer, path)
        elif source.is_file():
            if _binary(source):
                told = "it is neither text nor JSONL nor Parquet."
                raise AccError.of("ACC131", str(source), told, f"give text files, or rows with {_COLUMNS}")
            yield from _file(tokenizer, source)
        else:
            raise AccError.of("ACC130", str(source), "there is no such file or folder of text.", "check the path")


def _kind(path: Path) -> str:
    """The suffix that says how to read a file, `.gz` aside."""
    name = path.with_suffix("") if path.suffix == ".gz" else path
    return name.suffix.lower()


def _binary(path: Path) -> bool:
    """Whether a file is not text: it holds a zero byte near its start. Parquet is binary and known."""
    if _kind(path) == ".parquet":
        return False
    with _opened(path) as file:
        return b"\0" in file.read(4096)


def _opened(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _file(tokenizer: PreTrainedTokenizerBase, path: Path) -> Iterator[str]:
    kind = _kind(path)
    try:
        if kind == ".parquet":
            rows: Iterator[tuple[int, Row]] = enumerate(_parquet(path), 1)
        elif kind in (".jsonl", ".ndjson"):
            rows = _jsonl(path)
        elif kind == ".json":
            rows = _json(path)
        else:
            with _opened(path) as file:
                yield file.read().decode("utf-8", errors="replace")
            return
        for number, row in rows:
            yield _text(tokenizer, row, f"{path}:{number}")
    except (OSError, EOFError) as error:
        raise AccError.of("ACC131", str(path), f"it cannot be read ({error}).", "check the file") from error


def _jsonl(path: Path) -> Iterator[tuple[int, Row]]:
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, _row(line, f"{path}:{number}")


def _row(line: bytes, where: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise AccError.of("ACC131", where, f"this line is not JSON ({error}).", "one JSON object a line") from error
    if not isinstance(row, dict):
        raise AccError.of("ACC131", where, "this line is not a JSON object.", f"give rows with {_COLUMNS}")
    return row


def _json(path: Path) -> Iterator[tuple[int, Row]]:
    """A JSON file: a list of rows, or one text that happens to be JSON."""
    with _opened(path) as file:
        raw = file.read()
    try:
        loaded = json.loads(raw)
    except ValueError:
        loaded = None
    rows = loaded if isinstance(loaded, list) and loaded and all(isinstance(row, dict) for row in loaded) else None
    yield from enumerate(rows, 1) if rows else [(1, {"text": raw.decode("utf-8", errors="replace")})]


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            known = ("text", "messages", "conversations", "prompt", "completion")
            columns = [name for name in file.schema_arrow.names if name in known]
            if not columns:
                raise _unknown_columns(str(path), file.schema_arrow.names)
            for batch in file.iter_batches(batch_size=256, columns=columns):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        told = f"it is not a Parquet file that can be read ({str(error).splitlines()[0][:200]})."
        raise AccError.of("ACC131", str(path), told, "check the file") from error


def _text(tokenizer: PreTrainedTokenizerBase, row: Row, where: str) -> str:
    """The text of one row."""
    if isinstance(text := row.get("text"), str):
        return text
    for name in ("messages", "conversations"):
        if isinstance(row.get(name), list):
            return _chat(tokenizer, row[name], where)
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        return prompt + completion
    if isinstance(prompt, list) and isinstance(completion, list):
        return _chat(tokenizer, [*prompt, *completion], where)
    raise _unknown_columns(where, list(row))


def _unknown_columns(where: str, names: Sequence[str]) -> AccError:
    told = f"no text among the columns {', '.join(f'`{name}`' for name in names) or '(none)'}."
    return AccError.of("ACC132", where, told, f"rename them: rows need {_COLUMNS}")


def _chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Row], where: str) -> str:
    """A conversation as the model's template writes it."""
    if not getattr(tokenizer, "chat_template", None):
        told = "the row is a chat and the model's tokenizer has no chat template."
        raise AccError.of(
            "ACC134", where, told, "give plain text, or add the model's chat_template.jinja to its folder"
        )
    try:
        turns = [
            {"role": _SHAREGPT.get(turn["from"], turn["from"]), "content": turn["value"]} if "from" in turn else turn
            for turn in messages
        ]
        return cast(str, tokenizer.apply_chat_template(turns, tokenize=False))
    except Exception as error:  # templates are programs of the model and raise what they like
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        told = f"the model's chat template does not take this conversation ({reason})."
        raise AccError.of("ACC134", where, told, "messages are objects with `role` and `content`") from error
