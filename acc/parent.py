"""The parent: opened, checked and traced. A trace is kept in the store, since it depends on the configuration alone."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from acc.diag import AccError
from acc.fingerprint import code_digest, version
from acc.ir import Artifact, ModelIR
from acc.store import Entry, Store

if TYPE_CHECKING:
    from acc.checkpoint import Checkpoint


@dataclass(frozen=True)
class Parent:
    """The model to compress.

    Attributes:
        name: as the user gave it.
        checkpoint: its local Hugging Face folder.
        ir: as traced, with the artifacts `parent` and `weights`, both that folder.
        trace: what tracing took; `stored` whether it came from the store.
    """

    name: str
    checkpoint: Checkpoint
    ir: ModelIR
    trace: Entry
    stored: bool


def open_parent(model: str, store: Store) -> Parent:
    """Open a folder, a hub id or a GGUF file and trace it.

    Raises:
        AccError: of the checkpoint (1xx) or of the trace (2xx).
    """
    from acc.checkpoint import open_model

    checkpoint = open_model(model, store.models)
    trace, stored = _traced(checkpoint, store)
    folder = Artifact(str(checkpoint.folder.absolute()), checkpoint.digest)
    ir = ModelIR.from_json(trace.ir).with_artifacts(parent=folder, weights=folder)
    return Parent(model, checkpoint, ir, trace, stored)


def read_ir(path: Path) -> ModelIR:
    """An IR from a file: the text form (`.acc`) of a dump, or the JSON of a state that the manager kept.

    Raises:
        AccError: ACC330 if it cannot be read.
    """
    try:
        content = path.read_text("utf-8")
        if path.suffix == ".json":
            return ModelIR.from_json(json.loads(content))
        from acc import text

        return text.parse(content)
    except AccError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = "give what `acc opt --dump-after-all` or a failed pass left, or a model"
        raise AccError.of("ACC330", str(path), f"is no IR: {type(error).__name__}: {error}", hint) from None


def _traced(checkpoint: Checkpoint, store: Store) -> tuple[Entry, bool]:
    config = json.dumps(checkpoint.config.to_dict(), sort_keys=True, default=str)
    parts = [config, code_digest("acc.trace"), version("torch"), version("transformers")]
    key = f"trace-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]}"
    entry = store.find(key)
    if entry is not None:
        return entry, True
    with store.writer(key):
        entry = store.find(key)
        if entry is not None:
            return entry, True
        from acc.instruments import Meter
        from acc.trace import trace

        with Meter() as meter:
            ir = trace(checkpoint.config)
        entry = Entry(key, ir.to_json(), {}, meter.seconds, meter.peak_rss_bytes)
        store.commit(entry)
    return entry, False
