"""A missing, broken, crashing or hanging engine, and files that are none: each is one diagnostic, and acc lives on."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from engine_files import cpu_target, write_llama

from acc.backends.llamacpp.child import Child
from acc.backends.llamacpp.discover import VARIABLE, choose, in_folder, in_wheel, places
from acc.backends.llamacpp.options import Options
from acc.backends.llamacpp.session import LlamaSession, open_session
from acc.diag import AccError

unix = pytest.mark.skipif(os.name != "posix", reason="signals")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engine") / "tiny.gguf"
    write_llama(path)
    return path


def opened(artifact: Path, **options: Any) -> LlamaSession:
    session = open_session(artifact, cpu_target(**options), context=256)
    assert isinstance(session, LlamaSession)
    return session


def code(error: pytest.ExceptionInfo[AccError]) -> str:
    return error.value.diagnostics[0].code


@unix
@pytest.mark.parametrize(
    ("number", "wanted", "words"),
    [
        (signal.SIGSEGV, "LC052", r"crashed during `generate` \(SIGSEGV\)"),
        (signal.SIGILL, "LC052", r"\(SIGILL\)"),
        (signal.SIGABRT, "LC052", r"\(SIGABRT\)"),
        (signal.SIGKILL, "LC054", "ran out of memory"),
    ],
)
def test_a_crash_in_the_middle_is_a_diagnostic(tiny: Path, number: signal.Signals, wanted: str, words: str) -> None:
    with opened(tiny) as session:
        threading.Timer(0.3, session._child.process.send_signal, [number]).start()
        with pytest.raises(AccError, match=words) as error:
            _generate_for_ever(session)
        assert code(error) == wanted
        with pytest.raises(AccError):  # and so is every request after it
            session.generate([1], 1)
    with opened(tiny) as session:
        assert session.generate([1], 1)


def _generate_for_ever(session: LlamaSession) -> None:
    while True:  # until the signal comes
        session.generate([1, 2, 3], 200)


@unix
def test_a_hang_is_stopped_after_the_time_limit(tiny: Path) -> None:
    with opened(tiny, timeout=1.5) as session:
        session._child.process.send_signal(signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(AccError, match=r"no answer to `generate` within 2 s") as error:
            session.generate([1], 1)
        assert code(error) == "LC053"
        assert time.monotonic() - start < 10
        assert session._child.process.wait(5) != 0
        with pytest.raises(AccError) as again:  # why it ended, and not a new story
            session.generate([1], 1)
        assert again.value is error.value


@unix
def test_the_engine_does_not_outlive_acc(tiny: Path) -> None:
    program = (
        "import os, sys; from engine_files import cpu_target; from pathlib import Path\n"
        "from acc.backends.llamacpp.session import open_session\n"
        "s = open_session(Path(sys.argv[1]), cpu_target(), context=64)\n"
        "print(s._child.process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", program, str(tiny)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, timeout=60)
    child = int(done.stdout)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _runs(child):
        time.sleep(0.05)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]
    except OSError:
        return False


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.95])
def test_a_truncated_file_is_refused(tiny: Path, tmp_path: Path, keep: float) -> None:
    data = tiny.read_bytes()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(data[: int(keep * len(data))])
    with pytest.raises(AccError, match="refused `load`: the engine does not load this file") as error:
        opened(broken)
    assert code(error) == "LC056"


def test_the_engines_own_reason_is_told(tmp_path: Path, tiny: Path) -> None:
    stranger = tmp_path / "stranger.gguf"
    stranger.write_bytes(tiny.read_bytes().replace(b"llama", b"lamma"))
    with pytest.raises(AccError, match="unknown model architecture: 'lamma'") as error:
        opened(stranger)
    assert code(error) == "LC056"


def test_a_corrupt_header_is_a_diagnostic_whatever_the_engine_does(tiny: Path, tmp_path: Path) -> None:
    data = bytearray(tiny.read_bytes())
    data[8:24] = (1 << 62).to_bytes(8, "little") * 2  # absurd numbers of tensors and keys
    broken = tmp_path / "absurd.gguf"
    broken.write_bytes(bytes(data))
    with pytest.raises(AccError) as error:
        opened(broken)
    assert code(error) in {"LC052", "LC054", "LC056"}


def test_a_missing_file_is_told_as_that(tmp_path: Path) -> None:
    with pytest.raises(AccError, match="there is no such file"):
        opened(tmp_path / "none.gguf")


@pytest.mark.skipif(sys.platform != "linux", reason="prlimit")
def test_too_little_memory_is_told_as_that(tiny: Path) -> None:
    import resource

    wheel = in_wheel()
    assert wheel is not None
    assert wheel.library is not None
    with Child(wheel.library, timeout=60) as child:
        resource.prlimit(child.process.pid, resource.RLIMIT_AS, (3 << 30, 3 << 30))
        with pytest.raises(AccError, match="ran out of memory during `load`") as error:
            child.ask("load", path=str(tiny), options=dataclasses.asdict(Options(context=1 << 24)))
        assert code(error) == "LC054"
        assert "lower the context" in error.value.diagnostics[0].hint
        assert child.ask("load", path=str(tiny), options=dataclasses.asdict(Options(context=256)))["vocab"] == 320


def test_a_library_that_is_none(tmp_path: Path) -> None:
    fake = tmp_path / "libllama.so"
    fake.write_bytes(b"not a library")
    with pytest.raises(AccError, match="is not usable") as error:
        choose({"path": str(tmp_path)})
    assert code(error) == "LC051"
    assert "pip install xllamacpp" in error.value.diagnostics[0].hint


def test_a_library_of_something_else(tmp_path: Path) -> None:
    import _ctypes

    other = tmp_path / "libllama.so"
    other.symlink_to(_ctypes.__file__)
    with pytest.raises(AccError, match="is not usable: it has no function `llama_") as error:
        Child(other, timeout=10)
    assert code(error) == "LC051"


def test_a_folder_without_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AccError, match="holds neither libllama nor llama-bench"):
        choose({"path": str(tmp_path)})
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gone"))
    with pytest.raises(AccError, match="is not there"):
        choose({})


def test_no_engine_at_all_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("acc.backends.llamacpp.discover.in_wheel", lambda: None)
    monkeypatch.setattr("acc.backends.llamacpp.discover.built_folder", lambda: tmp_path / "none")
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(AccError, match="no usable llama") as error:
        choose({})
    assert code(error) == "LC050"
    assert "pip install xllamacpp" in error.value.diagnostics[0].hint


def test_the_users_folder_comes_before_the_wheel(tmp_path: Path, tiny: Path) -> None:
    wheel = in_wheel()
    assert wheel is not None
    assert wheel.library is not None
    (tmp_path / "build" / "bin").mkdir(parents=True)
    (tmp_path / "build" / "bin" / "libllama.so").symlink_to(wheel.library)
    assert places({"path": str(tmp_path)})[0].origin == "folder"
    with opened(tiny, path=str(tmp_path)) as session:
        assert session.info.origin == "folder"
        assert session.generate([1], 2)
    with opened(tiny, path=str(tmp_path), origin="wheel") as session:
        assert session.info.origin == "wheel"


@unix
def test_a_folder_with_tools_alone_is_timed_and_says_what_it_cannot_do(tmp_path: Path, tiny: Path) -> None:
    """The tool here answers as llama-bench does; the real one is tried in `test_engine_versions.py`."""
    tool = tmp_path / "llama-bench"
    row = '{"n_prompt": 16, "avg_ns": 3000000, "flash_attn": -1}'
    tool.write_text(f"#!/bin/sh\ncase \"$*\" in *'-m {tiny}'*) echo '[{row}]';; *) exit 3;; esac\n", "utf-8")
    tool.chmod(0o755)
    assert in_folder(tmp_path, "folder").library is None
    target = cpu_target(path=str(tmp_path))
    with open_session(tiny, target, context=64) as session:
        assert session.time(target.workload) == pytest.approx((0.003, 0.001))
        with pytest.raises(AccError, match="gives no logits") as error:
            session.logits([1])
    assert code(error) == "LC059"
    with (
        open_session(tmp_path / "other.gguf", target, context=64) as session,
        pytest.raises(AccError, match="ended with 3"),
    ):
        session.time(target.workload)


def test_arrays_that_cannot_be_written_are_told_as_that(tiny: Path) -> None:
    with opened(tiny) as session:
        (session._child.scratch / "logits.npy").mkdir()
        with pytest.raises(AccError, match="an array cannot be handed over: Is a directory") as error:
            session.logits([1, 2])
        assert code(error) == "LC066"
        assert session.generate([1], 1)
