"""The bundle: the folder that a compile leaves. Written beside its place and renamed; only a bundle is ever replaced.

model.gguf          the artifact that the engine loads (name and kind as the backend says)
model-f16.gguf      the same before quantisation, if asked for
hf/                 the Hugging Face checkpoint
arch.json           what was kept of each dim
ir.json             the ModelIR, for `acc bench` and `acc opt`
report.json report.html run.md
"""

from __future__ import annotations

import contextlib
import json
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acc import __version__
from acc.diag import AccError
from acc.ir import Artifact, ModelIR
from acc.store import output_lock, writing

if TYPE_CHECKING:
    from acc.report.data import Report

FORMAT = 1


@dataclass(frozen=True)
class Bundle:
    """A bundle on disk.

    Attributes:
        ir: the compiled model; its artifacts are the bundle's own files, and `parent` where that still is.
    """

    folder: Path
    ir: ModelIR
    report: Report


def read(folder: Path) -> Bundle:
    """A bundle. Raises AccError ACC506 if the folder is none, or is damaged."""
    from acc.report import data

    if not is_bundle(folder):
        raise AccError.of(
            "ACC506", str(folder), "is not a bundle of acc", "give the folder that `acc compile -o` wrote"
        )
    try:
        ir = ModelIR.from_json(json.loads((folder / "ir.json").read_text("utf-8")))
        report = data.read(folder / "report.json")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AccError.of("ACC506", str(folder), f"is damaged: {error}", "compile it again") from None
    inside = {kind: Artifact(str((folder / a.path).absolute()), a.digest) for kind, a in ir.artifacts.items()}
    return Bundle(folder, ir.with_artifacts(**inside), report)


def is_bundle(folder: Path) -> bool:
    """Whether acc wrote the folder."""
    try:
        return "acc" in json.loads((folder / "arch.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def output(out: Path) -> Iterator[Path]:
    """Hold `out` for one compile; what is in the folder that is handed over becomes `out` at the end.

    Raises:
        AccError: ACC505 if something that is no bundle stands there; ACC504 if another compile holds it; ACC501 if it
            cannot be written, found out before any work.
    """
    out = out.absolute()
    with output_lock(out):
        if out.exists() and not is_bundle(out) and (not out.is_dir() or any(out.iterdir())):
            hint = "give another folder with -o, or remove it yourself"
            raise AccError.of("ACC505", str(out), "exists and is not a bundle of acc, so it is left alone", hint)
        fresh = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}")
        try:
            with writing(out.parent, f"write {out}"):
                fresh.mkdir()
            yield fresh
            with writing(out.parent, f"write {out}"):
                _swap(fresh, out)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)


def fill(folder: Path, ir: ModelIR, store: Path, files: Mapping[str, str], parent: str) -> None:
    """Copy artifacts into a bundle and write `arch.json` and `ir.json`.

    Args:
        files: the name in the bundle by artifact kind, e.g. `{"gguf": "model.gguf", "hf": "hf"}`.
        parent: the model as the user named it.
    """
    with writing(folder.parent, "write the bundle"):
        for kind, name in files.items():
            source = store / ir.artifacts[kind].path
            if source.is_dir():
                shutil.copytree(source, folder / name)
            else:
                shutil.copyfile(source, folder / name)
        shape = ir.model_shape()
        arch = {"acc": __version__, "format": FORMAT, "parent": parent, "parameters": ir.parameters()}
        layers = [vars(layer) for layer in shape.layers]
        arch |= {"shape": {**vars(shape), "layers": layers}, "arch": ir.arch.to_json()}
        write_json(folder / "arch.json", arch)
        own = {kind: Artifact(name, ir.artifacts[kind].digest) for kind, name in files.items()}
        if "hf" in own:
            own["weights"] = own["hf"]
        kept = {"parent": ir.artifacts["parent"], **own}
        write_json(folder / "ir.json", ModelIR(**{**vars(ir), "artifacts": kept}).to_json())


def write_json(path: Path, value: Any) -> None:
    """A JSON file that people can read."""
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", "utf-8")


def _swap(fresh: Path, out: Path) -> None:
    """Put `fresh` in the place of `out`; an old bundle is removed only when the new one stands."""
    if not out.exists():
        fresh.rename(out)
        return
    old = out.with_name(f".{out.name}.old.{uuid.uuid4().hex[:8]}")
    out.rename(old)
    try:
        fresh.rename(out)
    except OSError:
        old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)
