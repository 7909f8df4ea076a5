"""How a model is loaded and run in llama.cpp: the engine options of a target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from acc.diag import AccError, nearest
from acc.machine import threads

if TYPE_CHECKING:
    from acc.target import Target

CACHE_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "iq4_nl": 20}
"""KV cache types and their numbers in the GGUF format."""
FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}

DEFAULT_TIMEOUT = 600.0


@dataclass(frozen=True)
class Options:
    """How a model is loaded and run.

    Attributes:
        context: tokens that the KV cache holds per sequence.
        sequences: requests at once.
        threads: for prompts and for decoding.
        batch: tokens per call of llama_decode at most (llama.cpp's `-b`).
        ubatch: tokens per graph (`-ub`).
        flash_attn: `on`, `off` or `auto`.
        type_k, type_v: KV cache types, as in `CACHE_TYPES`.
        gpu_layers: layers on the GPU; None leaves the engine's default (all, if it has one).
    """

    context: int
    sequences: int = 1
    threads: int = 1
    batch: int = 2048
    ubatch: int = 512
    flash_attn: str = "auto"
    type_k: str = "f16"
    type_v: str = "f16"
    gpu_layers: int | None = None


_KNOWN: dict[str, tuple[str, type]] = {
    "threads": ("threads", int),
    "n_batch": ("batch", int),
    "n_ubatch": ("ubatch", int),
    "flash_attn": ("flash_attn", str),
    "type_k": ("type_k", str),
    "type_v": ("type_v", str),
    "n_gpu_layers": ("gpu_layers", int),
}
_ELSEWHERE = {"path", "origin", "timeout"}
"""Options about which engine is used, and not how."""


def options_for(target: Target, *, context: int, batch: int) -> Options:
    """The options of a target, for `batch` requests at once that each hold `context` tokens.

    Raises:
        AccError: LC058 for an option that llama.cpp does not have here, or a value that it does not take.
    """
    given: dict[str, Any] = {"threads": target.device.threads or threads()}
    for name, value in target.engine_options.items():
        if name in _ELSEWHERE:
            continue
        if name not in _KNOWN:
            hint = nearest(name, {*_KNOWN, *_ELSEWHERE})
            raise AccError.of("LC058", name, "llama.cpp has no such engine option", hint)
        field, kind = _KNOWN[name]
        if not isinstance(value, kind) or (isinstance(value, int) and name != "n_gpu_layers" and value < 1):
            raise AccError.of("LC058", name, f"takes {_kind(kind)}, not {value!r}", "correct it in the target")
        given[field] = value
    for name, known in (("flash_attn", FLASH_ATTENTION), ("type_k", CACHE_TYPES), ("type_v", CACHE_TYPES)):
        if given.get(name, next(iter(known))) not in known:
            raise AccError.of("LC058", name, f"does not take `{given[name]}`", nearest(str(given[name]), known))
    return Options(context=context, sequences=batch, **given)


def timeout_for(target: Target) -> float:
    """Seconds that one request to the engine may take."""
    value = target.engine_options.get("timeout", DEFAULT_TIMEOUT)
    if not isinstance(value, (int, float)) or value <= 0:
        raise AccError.of("LC058", "timeout", f"takes seconds above 0, not {value!r}", "correct it in the target")
    return float(value)


def _kind(kind: type) -> str:
    return "a whole number above 0" if kind is int else "text"
