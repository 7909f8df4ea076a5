"""The store: what passes left, addressed by what it was made from.

    results/<key>/      one finished run of a pass: `entry.json` and its files; never changed
    scratch/<key>/      the same while it is being written; renamed into `results` as a whole
    states/             the IR before a stage that failed, so that it can be run again alone
    models/             parents that had to be unpacked or fetched
    locks/ sessions/    who computes which key; which keys a living process uses

A folder appears in `results` by one rename, so a killed run leaves nothing half-written there. Locks are the operating
system's: they end with the process that holds them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from acc.diag import AccError

ENTRY = "entry.json"


@dataclass(frozen=True)
class Entry:
    """A finished run of a pass.

    Attributes:
        key: its name in the store.
        ir: the model after the pass, as `ModelIR.to_json` gives it.
        facts: what the pass told the report.
        seconds: wall time that it took.
        peak_rss_bytes: most resident memory of acc and its children while it ran.
    """

    key: str
    ir: Mapping[str, Any]
    facts: Mapping[str, Any]
    seconds: float
    peak_rss_bytes: int


@dataclass(frozen=True)
class Collected:
    """What `gc` removed and what it left: counts and bytes."""

    removed: int
    removed_bytes: int
    kept: int
    kept_bytes: int


class Store:
    """Results of passes in one folder, shared by any number of processes.

    Args:
        root: the folder; made if it does not exist.

    Raises:
        AccError: ACC501 if the folder cannot be made or written.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.results, self.scratch = self.root / "results", self.root / "scratch"
        self.states, self.models = self.root / "states", self.root / "models"
        self._locks, self._sessions = self.root / "locks", self.root / "sessions"
        with writing(self.root, "make the store"):
            for folder in (self.results, self.scratch, self.states, self.models, self._locks, self._sessions):
                folder.mkdir(parents=True, exist_ok=True)
        self._session = _Session(self._sessions)

    def close(self) -> None:
        """Say that this process uses no entry any more."""
        self._session.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def find(self, key: str) -> Entry | None:
        """A finished run whose files are all there, marked as used; None if there is none."""
        folder = self.results / key
        with self._guard():
            try:
                data = json.loads((folder / ENTRY).read_text("utf-8"))
                entry = Entry(data["key"], data["ir"], data["facts"], data["seconds"], data["peak_rss_bytes"])
            except (OSError, ValueError, KeyError, TypeError):
                return None
            paths = [path for path, _ in entry.ir["artifacts"].values()]
            if not all((self.results / path).exists() for path in paths):
                return None
            self._session.use(key, *(Path(path).parts[0] for path in paths if not Path(path).is_absolute()))
            with contextlib.suppress(OSError):  # a store that may only be read can still be used
                os.utime(folder)
        return entry

    def use(self, key: str) -> None:
        """Say that this process uses a folder of `results`."""
        with self._guard():
            self._session.use(key)

    @contextlib.contextmanager
    def writer(self, key: str, *, resume: bool = False) -> Iterator[Path]:
        """The scratch folder of a key, this process's alone; what is left there is lost unless `commit` is called.

        Args:
            key: the key that is going to be computed. Another process that computes it is waited for.
            resume: hand over, and leave behind on failure, what was written so far.
        """
        folder = self.scratch / key
        with FileLock(self._locks / f"{key}.lock"):
            with writing(self.root, f"write {key}"):
                if not resume:
                    shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True, exist_ok=True)
            try:
                yield folder
            finally:
                if not resume:
                    shutil.rmtree(folder, ignore_errors=True)

    def commit(self, entry: Entry) -> None:
        """Make the scratch folder of `entry.key` a result, in one rename; to be called inside its `writer`."""
        folder, final = self.scratch / entry.key, self.results / entry.key
        with writing(self.root, f"write {entry.key}"):
            (folder / ENTRY).write_text(json.dumps(vars(entry)), "utf-8")
            with self._guard():
                if final.exists():  # a damaged entry of the same key
                    shutil.rmtree(final)
                folder.rename(final)
                self._session.use(entry.key)

    def save_state(self, key: str, ir: Mapping[str, Any]) -> Path:
        """Keep the IR before a stage that failed; the file to hand to `acc opt`."""
        path = self.states / f"{key}.json"
        with writing(self.root, "keep the state before the failure"), atomic(path) as temporary:
            temporary.write_text(json.dumps(ir), "utf-8")
        return path

    def collect(self, *, days: float | None = None, max_bytes: int | None = None) -> Collected:
        """Remove results that were not used for `days`, then the longest unused ones until `max_bytes` are kept.

        With neither, all go. What a living process uses is never removed; scratch folders of dead ones always are.
        """
        removed, removed_bytes, kept, kept_bytes = *self._collect_scratch(), 0, 0
        trash = self.scratch / f"trash-{uuid.uuid4().hex}"
        with self._guard():
            used = _Session.used(self._sessions)
            found = sorted(((p.stat().st_mtime, p, _bytes(p)) for p in self._entries()), reverse=True)
            for stamp, folder, size in found:
                old = days is not None and time.time() - stamp > days * 86400
                too_much = max_bytes is not None and kept_bytes + size > max_bytes
                if folder.name not in used and (old or too_much or (days is None and max_bytes is None)):
                    trash.mkdir(exist_ok=True)
                    folder.rename(trash / folder.name)
                    removed, removed_bytes = removed + 1, removed_bytes + size
                else:
                    kept, kept_bytes = kept + 1, kept_bytes + size
        shutil.rmtree(trash, ignore_errors=True)
        return Collected(removed, removed_bytes, kept, kept_bytes)

    def _entries(self) -> Iterator[Path]:
        return (path for path in self.results.iterdir() if path.is_dir())

    def _collect_scratch(self) -> tuple[int, int]:
        removed = removed_bytes = 0
        for folder in self.scratch.iterdir():
            lock = FileLock(self._locks / f"{folder.name}.lock", timeout=0)
            with contextlib.suppress(Timeout), lock:
                removed, removed_bytes = removed + 1, removed_bytes + _bytes(folder)
                shutil.rmtree(folder, ignore_errors=True)
        return removed, removed_bytes

    def _guard(self) -> FileLock:
        """Held for the moment of marking an entry as used, of a rename, and of `collect`'s decision."""
        return FileLock(self._locks / "store.lock")


class _Session:
    """The keys that this process uses, in a file that is locked as long as the process lives."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._lock = FileLock(self._path.with_suffix(".lock"))
        self._keys: set[str] = set()
        with contextlib.suppress(OSError):
            self._lock.acquire(timeout=0)

    def use(self, *keys: str) -> None:
        if not self._keys.issuperset(keys):
            self._keys.update(keys)
            with contextlib.suppress(OSError):
                self._path.with_suffix(".json").write_text(json.dumps(sorted(self._keys)), "utf-8")

    def close(self) -> None:
        self._keys.clear()
        self._path.with_suffix(".json").unlink(missing_ok=True)
        self._lock.release()
        self._path.with_suffix(".lock").unlink(missing_ok=True)

    @staticmethod
    def used(folder: Path) -> set[str]:
        """Keys of all living sessions; what dead ones left is removed."""
        keys: set[str] = set()
        for path in folder.glob("*.lock"):
            try:
                with FileLock(path, timeout=0):
                    path.with_suffix(".json").unlink(missing_ok=True)
                    path.unlink(missing_ok=True)
            except Timeout:
                with contextlib.suppress(OSError, ValueError):
                    keys.update(json.loads(path.with_suffix(".json").read_text("utf-8")))
        return keys


@contextlib.contextmanager
def output_lock(out: Path) -> Iterator[None]:
    """Hold an output folder for one compile. Raises AccError ACC504 if another one is at it."""
    lock_path = out.parent / f".{out.name}.acc.lock"
    with writing(out.parent, f"write {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(lock_path, timeout=0)
        try:
            lock.acquire()
        except Timeout:
            hint = "wait for it, or give another folder with -o"
            raise AccError.of("ACC504", str(out), "another acc is writing this folder just now", hint) from None
    try:
        yield
    finally:
        lock_path.unlink(missing_ok=True)
        lock.release()


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, renamed to it at the end; removed if anything goes wrong."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if temporary.exists() or temporary.is_symlink():
            temporary.unlink()


@contextlib.contextmanager
def writing(place: Path, what: str) -> Iterator[None]:
    """Tell faults of the disk as diagnostics: ACC501 not writable, ACC502 full.

    Libraries wrap what the system says in errors of their own, so a full disk is also recognised by its text.
    """
    try:
        yield
    except AccError:
        raise
    except Exception as error:
        told = disk_error(error, place, what)
        if told is None:
            raise
        raise told from error


def disk_error(error: BaseException, place: Path, what: str) -> AccError | None:
    """The diagnostic for an error that a full or unwritable disk caused; None if it is another kind of error."""
    number = error.errno if isinstance(error, OSError) else None
    text = str(error)
    if number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in text or "os error 28" in text:
        hint = "free some space, run `acc gc`, or choose another place with --store or -o"
        return AccError.of("ACC502", _mount(place), f"no space left on the disk to {what}", hint)
    if number in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.EEXIST) or "Read-only file" in text:
        name = getattr(error, "filename", None) or place
        reason = os.strerror(number).lower() if number else "read-only file system"
        return AccError.of("ACC501", str(name), f"cannot {what}: {reason}", "choose another place with --store or -o")
    return None


def _mount(place: Path) -> str:
    while not place.exists() and place != place.parent:
        place = place.parent
    return str(place)


def _bytes(folder: Path) -> int:
    if not folder.is_dir():
        return folder.stat().st_size
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
