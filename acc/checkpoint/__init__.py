"""A model as input: a folder, a hub id or a GGUF file becomes one checked folder, read tensor by tensor."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acc.checkpoint.writing import CARRIED, GGUF_TOKENIZER, write
from acc.diag import AccError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

__all__ = ["Checkpoint", "file_digest", "open_model", "write"]

_INDEX = "model.safetensors.index.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class Checkpoint:
    """A local Hugging Face folder of safetensors. Tensors are read one at a time; nothing else stays in memory."""

    def __init__(self, folder: Path, cache: Path | None = None) -> None:
        self.folder = folder
        self._cache = cache
        self._open = threading.local()  # safetensors handles, one set per thread

    @classmethod
    def at(cls, folder: Path, cache: Path | None = None) -> Checkpoint:
        """The checkpoint in a folder that acc wrote, or that `open_model` has checked; nothing is read yet."""
        return cls(folder, cache)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.folder)!r})"

    @cached_property
    def shards(self) -> Mapping[str, str]:
        """The file that holds each tensor, by tensor name, in the order of the files."""
        index = self.folder / _INDEX
        if index.is_file():
            return _weight_map(index)
        single = self.folder / "model.safetensors"
        if not single.is_file():
            raise _no_weights(self.folder)
        return dict.fromkeys(self._handle(single.name).keys(), single.name)

    @cached_property
    def digest(self) -> str:
        """A sha256 of the config, the weights and the tokenizer: of what the files hold, not of where they lie."""
        names = sorted({"config.json", *self.shards.values(), *(n for n in CARRIED if (self.folder / n).is_file())})
        whole = hashlib.sha256()
        for name in names:
            whole.update(f"{name} {file_digest(self.folder / name, self._cache)}\n".encode())
        return whole.hexdigest()

    @cached_property
    def config(self) -> PretrainedConfig:
        """Transformers' configuration, read without running any code of the folder."""
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)

    @cached_property
    def config_json(self) -> dict[str, Any]:
        """config.json as it is written."""
        loaded: dict[str, Any] = json.loads((self.folder / "config.json").read_text("utf-8"))
        return loaded

    def names(self) -> list[str]:
        """The names of all stored tensors; a tied tensor is stored once."""
        return list(self.shards)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, as stored."""
        tensor: torch.Tensor = self._found(name).get_tensor(name)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, from the file's header."""
        return tuple(self._found(name).get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The stored number format of a tensor, such as `BF16`, from the file's header."""
        return str(self._found(name).get_slice(name).get_dtype())

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's own tokenizer.

        Raises:
            AccError: ACC110 if the folder has none that can be used.
        """
        from transformers import AutoTokenizer, PretrainedConfig

        hint = "copy the tokenizer files of the original model into the folder (tokenizer.json, tokenizer_config.json)"
        if not any((self.folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            told = "the folder has no tokenizer, which this step needs."
            if (self.folder / GGUF_TOKENIZER).is_file():
                told = "the GGUF's tokenizer is of a kind that acc cannot rebuild, and this step needs it."
            raise AccError.of("ACC110", str(self.folder), told, hint)
        try:
            # A config of no family: a cut one (hidden 512 with 9 heads) may be refused, and tokenizing needs none.
            options = {"local_files_only": True, "trust_remote_code": False, "config": PretrainedConfig()}
            return AutoTokenizer.from_pretrained(self.folder, **options)
        except Exception as error:  # Transformers and tokenizers raise anything on a broken tokenizer
            told = f"the tokenizer cannot be loaded ({_line(error)})."
            raise AccError.of("ACC110", str(self.folder), told, hint) from error

    def _found(self, name: str) -> Any:
        """The opened file that holds a tensor."""
        file = self.shards[name]
        handle = self._handle(file)
        if name not in handle.keys():  # noqa: SIM118 - not a dict
            told = f"the index says that the file holds `{name}`, and it does not."
            raise AccError.of("ACC107", str(self.folder / file), told, "download the index and the shards again")
        return handle

    def _handle(self, file: str) -> Any:  # safetensors.safe_open, whose methods have no types
        from safetensors import SafetensorError, safe_open

        handles: dict[str, Any] = self._open.__dict__
        if file not in handles:
            try:
                handles[file] = safe_open(self.folder / file, framework="pt")
            except FileNotFoundError as error:
                raise AccError.of(
                    "ACC106",
                    str(self.folder / file),
                    "this shard is named in the index but is not there.",
                    "download the missing file",
                ) from error
            except (SafetensorError, OSError) as error:
                raise AccError.of(
                    "ACC107",
                    str(self.folder / file),
                    f"the file is truncated or not safetensors ({_line(error)}).",
                    "download it again and compare its size or checksum",
                ) from error
        return handles[file]


def open_model(model: str, cache: Path) -> Checkpoint:
    """The checked checkpoint of a model.

    Args:
        model: a local Hugging Face folder, a GGUF file, or a hub id (only if the hub can be reached, or has been).
        cache: where acc keeps what it derives: converted GGUF files by content, digests of files.

    Raises:
        AccError: ACC1xx: every way in which the input can be bad has its code, sentence and hint.
    """
    from acc.checkpoint.check import check

    path = Path(model).expanduser()
    if path.is_file():
        from acc.checkpoint.gguf_in import convert

        if path.suffix in (".bin", ".pt", ".pth", ".ckpt"):
            raise pickled(path)
        return Checkpoint(convert(path, cache), cache)
    checkpoint = Checkpoint(path if path.is_dir() else _from_hub(model), cache)
    check(checkpoint, cache)
    return checkpoint


def _from_hub(model: str) -> Path:
    """The local snapshot of a hub model; only the kinds of files that acc reads are fetched."""
    if not _HUB_ID.fullmatch(model):
        raise AccError.of("ACC101", model, "there is no such folder or file.", "check the path")
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        wanted = ["config.json", "*.safetensors", _INDEX, *CARRIED]
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=wanted, etag_timeout=10))
    except GatedRepoError as error:
        told, hint = "the hub gives this model out only after its terms are accepted.", "accept them, `hf auth login`"
        raise AccError.of("ACC111", model, told, hint) from error
    except RepositoryNotFoundError as error:
        told = "there is no such folder, file or hub model."
        raise AccError.of("ACC101", model, told, "check the spelling") from error
    except Exception as error:  # httpx, OSError, ... : whatever the network brings
        raise AccError.of(
            "ACC111",
            model,
            "there is no such folder or file here, and the Hugging Face hub cannot be reached.",
            "give a local folder or a .gguf file, or go online",
        ) from error


def file_digest(path: Path, cache: Path | None) -> str:
    """The sha256 of a file; remembered in `cache` under the file's path, size and time of change."""
    stat = path.stat()
    key = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    note = cache / "digests" / hashlib.sha256(key.encode()).hexdigest() if cache else None
    if note and note.is_file() and len(known := note.read_text("ascii")) == 64:
        return known
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if note:
        remember(note, digest)
    return digest


def remember(note: Path, text: str) -> None:
    """Write a small cache file atomically; a cache that cannot be written costs time, not the work."""
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        scratch = note.with_name(f"{note.name}.{threading.get_native_id()}")
        scratch.write_text(text, "ascii")
        scratch.replace(note)
    except OSError:
        return


def pickled(where: Path) -> AccError:
    """The refusal of pickle files."""
    return AccError.of(
        "ACC105",
        str(where),
        "the weights are pickle files, which can run code when they are loaded; acc reads only safetensors.",
        "load the model once with Transformers and save_pretrained() it to a new folder",
    )


def _no_weights(folder: Path) -> AccError:
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        return pickled(folder)
    told = "the folder holds no weights (model.safetensors, or shards with their index)."
    return AccError.of("ACC106", str(folder), told, "download the weights too")


def _weight_map(index: Path) -> dict[str, str]:
    try:
        where = json.loads(index.read_text("utf-8"))["weight_map"]
        files = {str(name): str(file) for name, file in where.items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise AccError.of(
            "ACC107", str(index), f"the index of the shards cannot be read ({_line(error)}).", "download it again"
        ) from error
    for file in files.values():
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise AccError.of(
                "ACC107", str(index), f"the index names `{file}`, which is not a safetensors file of its folder."
            )
    return dict(sorted(files.items(), key=lambda item: item[1]))


def _line(error: BaseException) -> str:
    """The first line of an error's text, without its full stop."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200].rstrip(".")
