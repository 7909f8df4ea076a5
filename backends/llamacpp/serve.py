"""The commands that serve a GGUF file in llama.cpp itself, with the options that acc measures with."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from acc.target import Target


def serve(artifact: Path, target: Target) -> tuple[str, ...]:
    """Shell commands: llama.cpp's own server, and the prebuilt engine's, which needs nothing else installed."""
    from acc.backends.llamacpp.options import options_for

    workload = target.workload
    options = options_for(target, context=workload.held, batch=workload.batch)
    context = options.context * options.sequences
    flags = ["-m", str(artifact), "-c", str(context), "-np", str(options.sequences), "-t", str(options.threads)]
    flags += ["-b", str(options.batch), "-ub", str(options.ubatch)]
    if options.flash_attn != "auto":
        flags += ["-fa", options.flash_attn]
    if (options.type_k, options.type_v) != ("f16", "f16"):
        flags += ["-ctk", options.type_k, "-ctv", options.type_v]
    if options.gpu_layers is not None:
        flags += ["-ngl", str(options.gpu_layers)]
    code = (
        f"import xllamacpp as x; p = x.CommonParams(); p.model.path = {str(artifact)!r}; p.n_ctx = {context}; "
        f"p.n_parallel = {options.sequences}; "
        f"p.cpuparams.n_threads = p.cpuparams_batch.n_threads = {options.threads}; "
        "s = x.Server(p); print(s.listening_address, flush=True); input()"
    )
    return shlex.join(["llama-server", *flags]), shlex.join(["python", "-c", code])
