"""The store: whole entries or none, shared by processes, on disks that are full or closed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from acc.diag import AccError
from acc.store import Entry, Store, atomic, output_lock, writing


def _entry(key: str, *paths: str) -> Entry:
    return Entry(key, {"artifacts": {path: [path, "digest"] for path in paths}}, {"tokens": 3}, 1.5, 100)


def _write(store: Store, key: str, size: int = 4) -> None:
    with store.writer(key) as scratch:
        (scratch / "data").write_bytes(b"x" * size)
        store.commit(_entry(key, f"{key}/data"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root to mount a small tmpfs")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def _elsewhere(code: str, *arguments: Path | str, wait: bool = True) -> subprocess.Popen[str]:
    """Run code in another process; with `wait`, until it has printed a line."""
    command = [sys.executable, "-u", "-c", "import sys, time\nfrom acc.store import *\n" + textwrap.dedent(code)]
    child = subprocess.Popen([*command, *map(str, arguments)], stdout=subprocess.PIPE, text=True)
    if wait:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    return child


def test_what_was_committed_is_found_again(store: Store) -> None:
    assert store.find("a") is None
    _write(store, "a")
    with Store(store.root) as again:
        assert again.find("a") == _entry("a", "a/data")
    assert not list(store.scratch.iterdir())


def test_what_was_not_committed_leaves_nothing(store: Store) -> None:
    with contextlib.suppress(ZeroDivisionError), store.writer("a") as scratch:
        (scratch / "data").write_text("half")
        raise ZeroDivisionError
    assert store.find("a") is None
    assert not list(store.scratch.iterdir())


@pytest.mark.parametrize("damage", ["no entry", "cut entry", "no file"])
def test_a_damaged_entry_is_made_again(store: Store, damage: str) -> None:
    _write(store, "a")
    entry = store.results / "a" / "entry.json"
    if damage == "no entry":
        entry.unlink()
    elif damage == "cut entry":
        entry.write_text(entry.read_text()[:20])
    else:
        (store.results / "a" / "data").unlink()
    assert store.find("a") is None
    _write(store, "a")
    assert store.find("a") is not None


def test_an_entry_whose_input_was_collected_is_not_used(store: Store) -> None:
    _write(store, "first")
    with store.writer("second"):
        store.commit(_entry("second", "first/data"))
    shutil.rmtree(store.results / "first")
    assert store.find("second") is None


def test_a_killed_writer_leaves_no_entry_and_no_lock(store: Store) -> None:
    child = _elsewhere(
        """
        with Store(Path(sys.argv[1])).writer("a") as scratch:
            (scratch / "data").write_text("half")
            print("ready")
            time.sleep(600)
        """,
        store.root,
    )
    assert (store.scratch / "a" / "data").exists()
    child.kill()
    child.wait()
    assert store.find("a") is None
    _write(store, "a")
    assert (store.results / "a" / "data").read_bytes() == b"xxxx"


def test_a_resuming_pass_finds_what_the_killed_run_wrote(store: Store) -> None:
    child = _elsewhere(
        """
        with Store(Path(sys.argv[1])).writer("a", resume=True) as scratch:
            (scratch / "done-1").write_text("1")
            print("ready")
            time.sleep(600)
        """,
        store.root,
    )
    child.kill()
    child.wait()
    with store.writer("a", resume=True) as scratch:
        assert (scratch / "done-1").read_text() == "1"
    assert (store.scratch / "a" / "done-1").exists()  # still there after a second failure


def test_two_processes_on_one_key_work_once(store: Store) -> None:
    code = """
        store = Store(Path(sys.argv[1]))
        with store.writer("a") as scratch:
            if store.find("a") is None:
                with open(sys.argv[2], "a") as log: log.write("worked\\n")
                time.sleep(0.3)
                (scratch / "data").write_text("xxxx")
                store.commit(Entry("a", {"artifacts": {}}, {}, 0.0, 0))
        """
    log = store.root / "log"
    children = [_elsewhere(code, store.root, log, wait=False) for _ in range(4)]
    assert [child.wait(60) for child in children] == [0, 0, 0, 0]
    assert log.read_text() == "worked\n"


def test_gc_removes_by_age_and_by_size_longest_unused_first(store: Store) -> None:
    for age, key in enumerate(["new", "older", "oldest"]):
        _write(store, key, 1000)
        os.utime(store.results / key, (time.time() - age * 86400 - 60,) * 2)
    store.close()  # or all three would be in use
    with Store(store.root) as other:
        done = other.collect(days=1.5)
        assert (done.removed, done.kept) == (1, 2)
        assert sorted(path.name for path in other.results.iterdir()) == ["new", "older"]
        done = other.collect(max_bytes=1500)
        assert [path.name for path in other.results.iterdir()] == ["new"]
        assert 1000 <= done.kept_bytes <= 1500
        assert other.collect().removed == 1
        assert not list(other.results.iterdir())
        assert not list(other.scratch.iterdir())


def test_gc_leaves_what_a_living_process_uses(store: Store) -> None:
    for key in ("used", "written", "idle"):
        _write(store, key)
    store.close()
    child = _elsewhere(
        """
        store = Store(Path(sys.argv[1]))
        assert store.find("used")
        with store.writer("half") as scratch:
            (scratch / "data").write_text("half")
            print("ready")
            time.sleep(600)
        """,
        store.root,
    )
    with Store(store.root) as other:
        other.collect()
        assert [path.name for path in other.results.iterdir()] == ["used"]
        assert [path.name for path in other.scratch.iterdir()] == ["half"]
        child.send_signal(signal.SIGKILL)
        child.wait()
        other.collect()
        assert not list(other.results.iterdir())
        assert not list(other.scratch.iterdir())


def test_a_full_disk_is_told_and_leaves_nothing_half_written(small_disk: Path) -> None:
    with Store(small_disk / "store") as store:
        _write(store, "small")
        told = "no space left on the disk to write big"
        with (
            pytest.raises(AccError, match=told) as caught,
            store.writer("big") as scratch,
            writing(store.root, "write big"),
        ):
            (scratch / "data").write_bytes(b"x" * 1_000_000)
        first = caught.value.diagnostics[0]
        assert (first.code, caught.value.exit_code) == ("ACC502", 2)
        assert first.hint == "free some space, run `acc gc`, or choose another place with --store or -o"
        assert store.find("big") is None
        assert store.find("small") is not None
        assert not list(store.scratch.iterdir())


def test_a_full_disk_while_the_entry_is_written(small_disk: Path) -> None:
    with Store(small_disk / "store") as store:
        with pytest.raises(AccError, match="ACC502"), store.writer("big"):
            store.commit(Entry("big", {"artifacts": {}}, {"long": "x" * 1_000_000}, 0.0, 0))
        assert store.find("big") is None


def test_a_read_only_place(small_disk: Path, tmp_path: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(AccError) as caught:
        Store(small_disk / "store")
    assert caught.value.diagnostics[0].code == "ACC501"
    assert "cannot make the store: read-only file system" in str(caught.value)
    with pytest.raises(AccError, match="ACC501"), output_lock(small_disk / "out"):
        pass


def test_a_file_where_the_store_should_be(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("mine")
    with pytest.raises(AccError, match=r"ACC501.*cannot make the store"):
        Store(tmp_path / "store")
    assert (tmp_path / "store").read_text() == "mine"


def test_one_output_folder_has_one_compile(tmp_path: Path) -> None:
    out = tmp_path / "out"
    child = _elsewhere(
        """
        with output_lock(Path(sys.argv[1])):
            print("ready")
            time.sleep(600)
        """,
        out,
    )
    with pytest.raises(AccError) as caught, output_lock(out):
        pass
    assert str(caught.value) == (
        f"error[ACC504]: {out}: another acc is writing this folder just now\n\n"
        "hint: wait for it, or give another folder with -o"
    )
    child.kill()
    child.wait()
    with output_lock(out):
        pass
    assert not list(tmp_path.iterdir())


def test_atomic_leaves_the_old_file_on_failure(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps("old"))
    with contextlib.suppress(ZeroDivisionError), atomic(path) as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == '"old"'
    assert [child.name for child in tmp_path.iterdir()] == ["report.json"]
