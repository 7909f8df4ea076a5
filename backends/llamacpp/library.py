"""ctypes binding of the few functions of libllama and ggml that acc needs; used in the engine's child process only."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

from acc.backends.llamacpp.layout import Block, Fields, UnknownLayout, context_fields, model_fields

LOG_DEBUG, LOG_ERROR, LOG_CONTINUED = 1, 4, 5
"""GGML_LOG_LEVEL_DEBUG, _ERROR, and _CONT: the text goes on the line before."""

LogCallback = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)


class Batch(ctypes.Structure):
    """`llama_batch`; its layout is checked against `llama_batch_init` before use."""

    _fields_ = [
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    ]


BATCH_POINTERS = ("token", "embd", "pos", "n_seq_id", "seq_id", "logits")

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "llama_backend_init": (None, []),
    "llama_log_set": (None, [LogCallback, c_void_p]),
    "llama_print_system_info": (c_char_p, []),
    "llama_model_default_params": (Block, []),
    "llama_context_default_params": (Block, []),
    "llama_model_load_from_file": (c_void_p, [c_char_p, Block]),
    "llama_model_free": (None, [c_void_p]),
    "llama_model_desc": (c_int32, [c_void_p, c_char_p, c_size_t]),
    "llama_model_size": (ctypes.c_uint64, [c_void_p]),
    "llama_model_n_params": (ctypes.c_uint64, [c_void_p]),
    "llama_model_get_vocab": (c_void_p, [c_void_p]),
    "llama_init_from_model": (c_void_p, [c_void_p, Block]),
    "llama_free": (None, [c_void_p]),
    "llama_n_ctx": (c_uint32, [c_void_p]),
    "llama_n_batch": (c_uint32, [c_void_p]),
    "llama_n_ubatch": (c_uint32, [c_void_p]),
    "llama_n_seq_max": (c_uint32, [c_void_p]),
    "llama_set_n_threads": (None, [c_void_p, c_int32, c_int32]),
    "llama_get_memory": (c_void_p, [c_void_p]),
    "llama_memory_clear": (None, [c_void_p, c_bool]),
    "llama_batch_init": (Batch, [c_int32, c_int32, c_int32]),
    "llama_batch_free": (None, [Batch]),
    "llama_decode": (c_int32, [c_void_p, Batch]),
    "llama_synchronize": (None, [c_void_p]),
    "llama_get_logits": (POINTER(c_float), [c_void_p]),
    "llama_vocab_n_tokens": (c_int32, [c_void_p]),
    "llama_vocab_type": (c_int, [c_void_p]),
    "llama_tokenize": (c_int32, [c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool]),
    "llama_detokenize": (c_int32, [c_void_p, POINTER(c_int32), c_int32, c_char_p, c_int32, c_bool, c_bool]),
    "ggml_backend_dev_count": (c_size_t, []),
    "ggml_quantize_chunk": (c_size_t, [c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p]),
    "ggml_quantize_init": (None, [c_int]),
    "ggml_quantize_requires_imatrix": (c_bool, [c_int]),
    "ggml_type_name": (c_char_p, [c_int]),
    "ggml_blck_size": (c_int64, [c_int]),
    "ggml_row_size": (c_size_t, [c_int, c_int64]),
}

_OPTIONAL: dict[str, tuple[Any, list[Any]]] = {
    "llama_version": (c_char_p, []),
    "llama_attach_threadpool": (None, [c_void_p, c_void_p, c_void_p]),
    "ggml_version": (c_char_p, []),
    "ggml_commit": (c_char_p, []),
    "ggml_backend_load_all_from_path": (None, [c_char_p]),
    "ggml_backend_dev_get": (c_void_p, [c_size_t]),
    "ggml_backend_dev_name": (c_char_p, [c_void_p]),
    "ggml_backend_dev_description": (c_char_p, [c_void_p]),
    "ggml_threadpool_params_default": (Block, [c_int]),
    "ggml_backend_dev_by_type": (c_void_p, [c_int]),
    "ggml_backend_dev_backend_reg": (c_void_p, [c_void_p]),
    "ggml_backend_reg_get_proc_address": (c_void_p, [c_void_p, c_char_p]),
}

_OF_THE_CPU: dict[str, tuple[Any, list[Any]]] = {
    "ggml_threadpool_new": (c_void_p, [POINTER(Block)]),
    "ggml_threadpool_free": (None, [c_void_p]),
}
"""Functions of the CPU part, which may be a library of its own that is loaded later: asked for through its registry."""

_PARTS = ("ggml-base", *(f"ggml-{part}" for part in ("cpu", "blas", "cuda", "hip", "metal", "vulkan", "sycl")), "ggml")
"""The libraries that libllama may be linked to, each after those that it needs."""

_DEVICE_CPU = 0
"""GGML_BACKEND_DEVICE_TYPE_CPU."""


class Library:
    """A loaded libllama.

    Attributes:
        lines: what the engine has logged so far, one entry per line.
        errors: those of them that it calls errors.
        model_fields, context_fields: where the parameters lie in this version.
    """

    def __init__(self, path: Path) -> None:
        """Load the library.

        Raises:
            OSError: it cannot be loaded.
            UnknownLayout: a function is missing, or the parameter structs are not recognised.
        """
        self.path = path
        self._dlls = _load(path)
        for name, (result, arguments) in _SIGNATURES.items():
            self._bind(name, result, arguments, required=True)
        for name, (result, arguments) in _OPTIONAL.items():
            self._bind(name, result, arguments, required=False)
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._level = 0
        self._callback = LogCallback(self._log)  # kept: the library holds only a bare pointer
        self.llama_log_set(self._callback, None)
        self.llama_backend_init()
        if self.ggml_backend_dev_count() == 0 and self.has("ggml_backend_load_all_from_path"):
            self.ggml_backend_load_all_from_path(str(path.parent).encode())  # built with loadable CPU variants
        self._bind_cpu()
        self.model_fields: Fields = model_fields(self.llama_model_default_params())
        self.context_fields: Fields = context_fields(self.llama_context_default_params())
        self._check_batch()

    def has(self, name: str) -> bool:
        """Whether an optional function is there."""
        return name in self.__dict__

    def text(self, name: str) -> str:
        """The answer of a function without arguments that returns a string; "" if this version lacks it."""
        return (getattr(self, name)() or b"").decode(errors="replace").strip() if self.has(name) else ""

    def devices(self) -> list[str]:
        """Names and descriptions of the devices beside the CPU that the library can compute on."""
        if not self.has("ggml_backend_dev_get"):
            return []
        found = [self.ggml_backend_dev_get(i) for i in range(self.ggml_backend_dev_count())]
        named = [(self.ggml_backend_dev_name(d).decode(), self.ggml_backend_dev_description(d).decode()) for d in found]
        return [f"{name} ({description})" for name, description in named if name != "CPU"]

    def tokenize(self, vocab: int, text: str) -> list[int]:
        """Tokens of a text: special tokens parsed, no BOS added."""
        data = text.encode()
        room = len(data) + 8
        while True:
            buffer = (c_int32 * room)()
            count = self.llama_tokenize(vocab, data, len(data), buffer, room, False, True)
            if count >= 0:
                return list(buffer[:count])
            room = -count

    def detokenize(self, vocab: int, tokens: Sequence[int]) -> str:
        """The text of tokens, special tokens included."""
        ids = (c_int32 * len(tokens))(*tokens)
        room = 16 * len(tokens) + 16
        while True:
            buffer = ctypes.create_string_buffer(room)
            count = self.llama_detokenize(vocab, ids, len(tokens), buffer, room, False, True)
            if count >= 0:
                return buffer.raw[:count].decode(errors="replace")
            room = -count

    def __getattr__(self, name: str) -> Callable[..., Any]:
        # Reached only for functions that were not bound; declared so that the bound ones type-check.
        raise AttributeError(f"{self.path.name} has no function {name}")

    def _bind(self, name: str, result: Any, arguments: list[Any], *, required: bool) -> None:
        function = next((getattr(dll, name) for dll in self._dlls if hasattr(dll, name)), None)
        if function is None:
            if required:
                raise UnknownLayout(f"it has no function `{name}`")
            return
        function.restype, function.argtypes = result, arguments
        self.__dict__[name] = function

    def _bind_cpu(self) -> None:
        if not self.has("ggml_backend_reg_get_proc_address"):
            return
        device = self.ggml_backend_dev_by_type(_DEVICE_CPU)
        registry = self.ggml_backend_dev_backend_reg(device) if device else None
        for name, (result, arguments) in _OF_THE_CPU.items():
            address = self.ggml_backend_reg_get_proc_address(registry, name.encode()) if registry else None
            if address:
                self.__dict__[name] = ctypes.CFUNCTYPE(result, *arguments)(address)

    def _log(self, level: int, text: bytes, _: int | None) -> None:
        if level != LOG_CONTINUED:
            self._level = level
        if self._level == LOG_DEBUG:
            return
        piece = text.decode(errors="replace")
        if level == LOG_CONTINUED and self.lines:
            self.lines[-1] += piece.rstrip("\n")
        else:
            self.lines.append(piece.rstrip("\n"))
        if self._level == LOG_ERROR and piece.strip():
            self.errors.append(piece.strip())
        sys.stderr.write(piece)
        sys.stderr.flush()

    def _check_batch(self) -> None:
        batch = self.llama_batch_init(4, 0, 1)
        filled = [bool(getattr(batch, name)) for name in BATCH_POINTERS]
        if batch.n_tokens != 0 or filled != [True, False, True, True, True, True]:
            raise UnknownLayout("llama_batch does not have the fields that acc knows")
        self.llama_batch_free(batch)


def _load(path: Path) -> list[ctypes.CDLL]:
    """The library, and the ggml libraries beside it where they are not reached through it.

    Windows looks a function up in one library only, and a folder that was copied may have lost its rpath.
    """
    siblings = [p for stem in _PARTS for p in _named(path.parent, stem)]
    try:
        main = ctypes.CDLL(str(path))
    except OSError:
        if not siblings:
            raise
    else:
        return [main, *(ctypes.CDLL(str(sibling)) for sibling in siblings if os.name == "nt")]
    loaded = [ctypes.CDLL(str(sibling), mode=ctypes.RTLD_GLOBAL) for sibling in siblings]
    return [ctypes.CDLL(str(path)), *loaded]


def _named(folder: Path, stem: str) -> list[Path]:
    """The shared library of that name in a folder, if there is one."""
    names = (f"lib{stem}.so", f"lib{stem}.dylib", f"{stem}.dll")
    return [folder / name for name in names if (folder / name).is_file()]
