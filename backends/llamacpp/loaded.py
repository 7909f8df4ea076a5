"""A model loaded in this process: logits, greedy tokens, and the clock. Runs in the engine's child process only."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from acc.backends.llamacpp.layout import UnknownLayout
from acc.backends.llamacpp.library import Batch, Library
from acc.backends.llamacpp.options import CACHE_TYPES, FLASH_ATTENTION, Options

VOCAB_NONE = 0

CONTEXT_STEP = 256
"""libllama rounds the context of a sequence up to this; done here, so that what it took can be compared."""


class LoadFailed(Exception):
    """The engine refused a model or a context; its log says why."""


class Loaded:
    """A model with one context."""

    def __init__(self, library: Library, path: str, options: Options) -> None:
        """Load the model, make a context, and check that the engine took the options.

        Raises:
            LoadFailed: the engine refused the file or the context.
            UnknownLayout: an option could not be handed over in this version.
        """
        self._lib = library
        self.options = replace(options, context=-(-options.context // CONTEXT_STEP) * CONTEXT_STEP)
        params = library.llama_model_default_params()
        if options.gpu_layers is not None:
            library.model_fields.set(params, n_gpu_layers=options.gpu_layers)
        self._model = library.llama_model_load_from_file(os.fsencode(path), params)
        if not self._model:
            raise LoadFailed("the engine does not load this file")
        vocab = library.llama_model_get_vocab(self._model)
        self.vocab: int = library.llama_vocab_n_tokens(vocab)
        self._vocab = vocab
        self._pool: int | None = None
        self._context = library.llama_init_from_model(self._model, self._context_params())
        if not self._context:
            raise LoadFailed("the engine loads this file but makes no context for it")
        self._check_context()
        self._batch: int = library.llama_n_batch(self._context)  # a longer batch aborts the process
        self._set_threads()

    def describe(self) -> dict[str, Any]:
        """What is recorded with every measurement, as JSON."""
        buffer = ctypes.create_string_buffer(256)
        self._lib.llama_model_desc(self._model, buffer, len(buffer))
        return {
            "model": buffer.value.decode(errors="replace"),
            "weight_bytes": self._lib.llama_model_size(self._model),
            "parameters": self._lib.llama_model_n_params(self._model),
            "vocab": self.vocab,
            "threadpool": self._pool is not None,
            **asdict(self.options),
        }

    def tokenize(self, text: str) -> list[int]:
        """Tokens of a text; special tokens parsed, no BOS added."""
        if self._lib.llama_vocab_type(self._vocab) == VOCAB_NONE:
            raise LoadFailed("this file holds no tokenizer")
        return self._lib.tokenize(self._vocab, text)

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits of every position, float32 [tokens, vocab]."""
        self._clear()
        rows = [
            self._decode([tokens[start : start + self._batch]], start, every=True).copy()
            for start in range(0, len(tokens), self._batch)
        ]
        return np.concatenate(rows)

    def generate(self, tokens: Sequence[int], count: int) -> list[int]:
        """`count` tokens, each the most likely; an end token does not stop it."""
        self._clear()
        found = [self._prefill([tokens])[0]]
        while len(found) < count:
            found.append(self._step(found[-1:], len(tokens) + len(found) - 1)[0])
        return found[:count]

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return self._lib.detokenize(self._vocab, tokens)

    def warm_up(self, prompt: int) -> None:
        """Run one prompt batch and two tokens, so that pages, caches and threads are there; the cache is left empty."""
        self._clear()
        size = min(prompt, self._batch)
        last = self._prefill([_made_up(size, self.vocab, seed=0)])
        for position in range(size, min(size + 2, self.options.context)):
            last = self._step(last, position)
        self._clear()

    def time(self, prompt: int, output: int) -> tuple[float, list[float]]:
        """One round with `sequences` requests at once: seconds to the first tokens, seconds of each further decode."""
        prompts = [_made_up(prompt, self.vocab, seed=s) for s in range(self.options.sequences)]
        self._clear()
        self._lib.llama_synchronize(self._context)
        start = time.perf_counter()
        last = self._prefill(prompts)
        first = time.perf_counter() - start
        steps: list[float] = []
        for position in range(prompt, prompt + output - 1):
            start = time.perf_counter()
            last = self._step(last, position)
            steps.append(time.perf_counter() - start)
        self._clear()
        return first, steps

    def close(self) -> None:
        """Free everything."""
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)
        if self._pool is not None:
            self._lib.ggml_threadpool_free(self._pool)

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Decode prompts of one length; the most likely next token of each.

        As llama.cpp's server does, a call takes as many tokens of as many prompts as fit.
        """
        length = len(prompts[0])
        together = max(1, self._batch // length)
        following: list[int] = []
        for first in range(0, len(prompts), together):
            group = prompts[first : first + together]
            for start in range(0, length, self._batch):
                chunks = [prompt[start : start + self._batch] for prompt in group]
                logits = self._decode(chunks, start, first_sequence=first)
            following += [int(token) for token in logits.argmax(axis=1)]
        return following

    def _step(self, last: Sequence[int], position: int) -> list[int]:
        """Decode one token of every sequence; the most likely next one of each."""
        return [int(token) for token in self._decode([[token] for token in last], position).argmax(axis=1)]

    def _decode(
        self, chunks: Sequence[Sequence[int]], start: int, *, every: bool = False, first_sequence: int = 0
    ) -> np.ndarray:
        """One call of llama_decode: one chunk of tokens per sequence, all beginning at position `start`.

        Returns:
            A view into the engine's logits, float32 [outputs, vocab]: of every token, or of the last of each chunk.
        """
        lengths = [len(chunk) for chunk in chunks]
        tokens = np.concatenate([np.asarray(chunk, np.int32) for chunk in chunks])
        positions = np.concatenate([np.arange(start, start + length, dtype=np.int32) for length in lengths])
        counts = np.ones(len(tokens), np.int32)
        sequences = np.repeat(np.arange(first_sequence, first_sequence + len(chunks), dtype=np.int32), lengths)
        wanted = np.full(len(tokens), every, np.int8)
        wanted[np.cumsum(lengths) - 1] = 1
        int_pointer = ctypes.POINTER(ctypes.c_int32)
        pointers = (int_pointer * len(tokens))(
            *(ctypes.cast(sequences.ctypes.data + 4 * i, int_pointer) for i in range(len(tokens)))
        )
        batch = Batch(
            len(tokens),
            tokens.ctypes.data_as(int_pointer),
            None,
            positions.ctypes.data_as(int_pointer),
            counts.ctypes.data_as(int_pointer),
            pointers,
            wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )
        status = self._lib.llama_decode(self._context, batch)
        if status != 0:
            raise LoadFailed(f"llama_decode answers {status}")
        logits = self._lib.llama_get_logits(self._context)  # waits for the device
        return np.ctypeslib.as_array(logits, shape=(int(wanted.sum()), self.vocab))

    def _clear(self) -> None:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)

    def _context_params(self) -> Any:
        params = self._lib.llama_context_default_params()
        fields, options = self._lib.context_fields, self.options
        fields.set(
            params,
            n_ctx=options.context * options.sequences,
            n_batch=options.batch,
            n_ubatch=options.ubatch,
            n_seq_max=options.sequences,
        )
        if options.flash_attn != "auto":
            fields.set(params, flash_attn=FLASH_ATTENTION[options.flash_attn])
        if (options.type_k, options.type_v) != ("f16", "f16"):
            fields.set(params, type_k=CACHE_TYPES[options.type_k], type_v=CACHE_TYPES[options.type_v])
        return params

    def _check_context(self) -> None:
        """Read back what the engine took: an offset that was guessed wrongly must not go unnoticed."""
        options, lib = self.options, self._lib
        took = {
            "n_batch": lib.llama_n_batch(self._context),
            "n_ubatch": lib.llama_n_ubatch(self._context),
            "n_seq_max": lib.llama_n_seq_max(self._context),
        }
        context = lib.llama_n_ctx(self._context)
        asked = {
            "n_batch": min(options.batch, context),
            "n_ubatch": min(options.ubatch, options.batch, context),
            "n_seq_max": options.sequences,
        }
        if took != asked or context < options.context * options.sequences:
            raise UnknownLayout(f"the engine took {took} and a context of {context} where acc asked for {asked}")

    def _set_threads(self) -> None:
        """Use a pool of waiting threads, as llama.cpp's own server and bench do, where the library offers it."""
        threads, lib = self.options.threads, self._lib
        lib.llama_set_n_threads(self._context, threads, threads)
        if lib.has("ggml_threadpool_new") and lib.has("llama_attach_threadpool"):
            params = lib.ggml_threadpool_params_default(threads)
            self._pool = lib.ggml_threadpool_new(ctypes.byref(params))
            lib.llama_attach_threadpool(self._context, self._pool, self._pool)


def _made_up(count: int, vocab: int, seed: int) -> list[int]:
    """Token ids to time with: what they say does not matter, that they are spread over the vocabulary does."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab, count)]
