"""What of llama.cpp is usable on this machine, what is missing, and the command that mends it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from acc.backend_api import EngineInfo
from acc.backends.llamacpp.discover import DEVICES, INSTALL_HINT, usable
from acc.diag import AccError, Diagnostic
from acc.machine import gpus

_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("C:/Windows/System32/nvml.dll"))


def doctor() -> list[Diagnostic]:
    """Findings about every engine here, about building one, and about the GPU."""
    try:
        engines, found = usable({})
    except AccError as error:  # the folder that the user names is none
        return [*error.diagnostics, *_build_tools(), *_gpu([])]
    if not engines and not found:
        found.append(Diagnostic("LC050", "llamacpp", "there is no llama.cpp here", INSTALL_HINT))
    for info in engines:
        found += about(info)
    return found + _build_tools() + _gpu(engines)


def about(info: EngineInfo) -> list[Diagnostic]:
    """Whether an engine fits this processor: built for more than it grants, or for less."""
    from acc.backends.llamacpp.machine import lacking, unusable

    found = []
    too_much, too_little = unusable(info.build), lacking(info.build)
    if too_much:
        text = f"it was built for {', '.join(too_much)}, which this machine does not grant: expect it to crash"
        hint = "`acc engine build llamacpp` builds one that fits, `pip install xllamacpp` brings one"
        found.append(Diagnostic("LC064", info.path, text, hint, "warning"))
    if too_little and not too_much:
        text = f"it does not use {', '.join(too_little)} of this processor"
        hint = "`acc engine build llamacpp` builds one that does; measure with what you serve with"
        found.append(Diagnostic("LC063", info.path, text, hint, "note"))
    return found


def _build_tools() -> list[Diagnostic]:
    from acc.backends.llamacpp.build import missing_tools

    found = []
    for name, hint in missing_tools():
        text = "is missing: `acc engine build llamacpp` needs it (the prebuilt engine does not)"
        found.append(Diagnostic("LC060", name, text, hint, "note"))
    return found


def _gpu(engines: list[EngineInfo]) -> list[Diagnostic]:
    """Whether a GPU is here, can be seen, and is used by the preferred engine."""
    seen = gpus()
    if not seen:
        if any(path.exists() for path in _DRIVERS) and importlib.util.find_spec("pynvml") is None:
            text = "an NVIDIA driver is here, but acc cannot read the GPU's memory and load"
            return [Diagnostic("LC065", "GPU", text, "`pip install nvidia-ml-py`", "warning")]
        return []
    names = ", ".join(seen)
    if engines and DEVICES not in engines[0].build:
        text = f"{names}: here, and the engine in use ({engines[0].origin}) does not compute on it"
        return [
            Diagnostic("LC065", "GPU", text, "install the CUDA toolkit, then `acc engine build llamacpp`", "warning")
        ]
    return [Diagnostic("LC065", "GPU", f"{names}: seen", "", "note")]
