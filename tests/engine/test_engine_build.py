"""`acc engine build llamacpp` and `acc doctor`: flags from what is granted, failures in words, nothing half-made."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import pytest

from acc.backend_api import EngineInfo
from acc.backends.llamacpp import build, discover, doctor, machine
from acc.diag import AccError
from acc.passes_api import Progress

AVX512 = ("avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw")
WITH_AMX = "CPU : SSE3 = 1 | AVX = 1 | AVX2 = 1 | F16C = 1 | FMA = 1 | BMI2 = 1 | AMX_INT8 = 1 | REPACK = 1 | "

cmake = pytest.mark.skipif(build.missing_tools() != [], reason="no cmake or compiler")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the engine would be put."""
    monkeypatch.setattr(discover, "built_folder", lambda: tmp_path / "data" / "llamacpp")
    return tmp_path / "data" / "llamacpp"


def project(folder: Path, code: str) -> Path:
    """A source tree with llama.cpp's targets, whose library is `code`."""
    (folder / "include").mkdir(parents=True, exist_ok=True)
    (folder / "include" / "llama.h").write_text("", "utf-8")
    (folder / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.14)\nproject(fake CXX)\n"
        "set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)\n"
        "set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)\n"
        "add_library(llama SHARED a.cpp)\nadd_executable(llama-bench b.cpp)\n",
        "utf-8",
    )
    (folder / "a.cpp").write_text(code, "utf-8")
    (folder / "b.cpp").write_text("int main() { return 0; }", "utf-8")
    return folder


def steps(done: list[str]) -> Progress:
    def progress(step: int, total: int, what: str = "") -> None:
        done.append(f"{what} {step}/{total}")

    return progress


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86 flags")
def test_flags_name_what_the_system_shows_and_never_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = frozenset({"sse4_2", "avx", "avx2", "fma", "f16c", "bmi2", *AVX512, "amx_tile", "amx_int8"})
    monkeypatch.setattr(machine, "features", lambda: shown)
    flags = machine.cmake_flags()
    assert "-DGGML_NATIVE=OFF" in flags
    assert "-DGGML_AVX512=ON" in flags
    assert "-DGGML_AVX512_VNNI=OFF" in flags
    assert not any("AMX" in flag for flag in flags)


def test_a_library_built_for_amx_is_warned_of_where_amx_is_not_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = frozenset({"sse4_2", "avx", "avx2", "fma", "f16c", "bmi2"})
    monkeypatch.setattr(machine, "features", lambda: shown)
    monkeypatch.setattr(machine, "amx_granted", lambda: False)
    (found,) = doctor.about(EngineInfo("llamacpp", "folder", "1", WITH_AMX, "/lib", ("logits",)))
    assert found.code == "LC064"
    assert "it was built for AMX_INT8, which this machine does not grant: expect it to crash" in str(found)
    assert "acc engine build llamacpp" in found.hint
    monkeypatch.setattr(machine, "amx_granted", lambda: True)
    assert doctor.about(EngineInfo("llamacpp", "folder", "1", WITH_AMX, "/lib", ("logits",))) == []


def test_a_library_that_leaves_instructions_unused_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "features", lambda: frozenset({"sse4_2", "avx", "avx2", *AVX512}))
    (found,) = doctor.about(EngineInfo("llamacpp", "wheel", "1", "CPU : AVX = 1 | AVX2 = 1 |", "/lib", ("logits",)))
    assert (found.code, found.level) == ("LC063", "note")
    assert "does not use AVX512 " in found.message


def test_doctor_tells_of_a_gpu_that_the_engine_does_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "gpus", lambda: ("RTX 5070",))
    (found,) = [one for one in doctor.doctor() if one.code == "LC065"]
    assert "RTX 5070: here, and the engine in use (" in found.message
    assert "acc engine build llamacpp" in found.hint


def test_doctor_without_any_engine_says_how_to_get_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discover, "in_wheel", lambda: None)
    monkeypatch.delenv(discover.VARIABLE, raising=False)
    found = next(one for one in doctor.doctor() if one.code == "LC050")
    assert "pip install xllamacpp" in found.hint
    monkeypatch.setenv(discover.VARIABLE, str(folder / "nowhere"))
    assert "is not there" in next(one for one in doctor.doctor() if one.code == "LC050").message


def test_a_source_that_is_none(folder: Path, tmp_path: Path) -> None:
    if build.missing_tools():
        pytest.skip("no cmake or compiler")
    with pytest.raises(AccError, match="is no source tree") as error:
        build.build(tmp_path, steps([]))
    assert error.value.diagnostics[0].code == "LC061"


def test_missing_tools_are_named_before_any_work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_which", lambda name: None)
    with pytest.raises(AccError, match="cmake: is needed to build") as error:
        build.build(None, steps([]))
    assert "pip install cmake ninja" in error.value.diagnostics[0].hint
    assert not folder.parent.exists()


@cmake
def test_a_compile_error_is_told_and_the_next_try_goes_on(folder: Path, tmp_path: Path) -> None:
    source = project(tmp_path / "source", "this is not C++")
    with pytest.raises(AccError, match="error") as error:
        build.build(source, steps([]))
    assert error.value.diagnostics[0].code == "LC062"
    assert "goes on from here" in error.value.diagnostics[0].hint
    project(source, "extern int unused; int unused = 1;")
    done: list[str] = []
    with pytest.raises(AccError, match="has no function `llama_") as error:  # it compiles now, and is no llama.cpp
        build.build(source, steps(done))
    assert error.value.diagnostics[0].code == "LC051"
    assert any(step.startswith("compile") for step in done)
    assert not folder.exists()


@cmake
def test_a_build_that_fails_leaves_the_old_engine(folder: Path, tmp_path: Path) -> None:
    wheel = discover.in_wheel()
    assert wheel is not None
    assert wheel.library is not None
    folder.mkdir(parents=True)
    shutil.copy(wheel.library, folder / "libllama.so")
    with pytest.raises(AccError):
        build.build(project(tmp_path / "source", "int unused = 1;"), steps([]))
    assert [one.origin for one in discover.usable({"origin": "built"})[0]] == ["built"]
