"""The contract of a pass: options are typed fields, input is never mutated, results are files in the store.

A pass in ten lines:

    class RoundFFN(Pass):
        "Round every FFN width down to what the engine likes."

        name = "round-ffn"
        kind = "search"
        to: int = 256

        def run(self, ir: ModelIR, ctx: Context) -> PassResult:
            ffn = {dim.name: ir.size(dim.name) for dim in ir.select("ffn", free=True)}
            return PassResult(ir.resize({name: max(self.to, size // self.to * self.to) for name, size in ffn.items()}))
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, dataclass_transform

from acc.ir import Artifact, ModelIR

if TYPE_CHECKING:
    from acc.backend_api import Backend
    from acc.target import Target

Kind = Literal["analysis", "search", "transform", "lowering"]
TargetPart = Literal["device", "engine", "workload", "limits", "quant"]


@dataclass(frozen=True)
class PassResult:
    """What a pass returns.

    Attributes:
        ir: the model after the pass; the very object that came in if nothing changed.
        facts: JSON values for the report (numbers with their unit in the name: `seconds`, `kl_nats`).
    """

    ir: ModelIR
    facts: Mapping[str, Any] = field(default_factory=dict)


class Progress(Protocol):
    """Where long work reports: `step` done of `total`, in the pass's own words."""

    def __call__(self, step: int, total: int, what: str = "") -> None: ...


@dataclass(frozen=True)
class Context:
    """What the manager hands to a running pass.

    Attributes:
        store: the folder that relative artifact paths start from.
        scratch: this run's own folder; renamed into the store as a whole when the pass succeeds.
        key: the store key of this run; `artifact(name)` refers to what is written under `scratch / name`.
        target: where the model must be served, or None for pipelines that need none.
        backend: the engine of that target, or None.
        seed: for every random choice.
        progress: where long work reports.
        facts: the facts of the passes before, by pass name.
        code: digest of the pass's code; part of the names of `shared` folders.
        use: says that a folder of the store is in use, so that `acc gc` leaves it.
    """

    store: Path
    scratch: Path
    key: str
    target: Target | None
    backend: Backend | None
    seed: int
    progress: Progress
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    code: str = ""
    use: Callable[[str], None] = field(default=lambda key: None, repr=False)

    def path(self, artifact: Artifact) -> Path:
        """Where an artifact lies on this machine."""
        return self.store / artifact.path  # an absolute path stands for itself

    def shared(self, *parts: object) -> Path:
        """A folder in the store for partial results that depend on `parts`, the seed and the pass's code alone.

        For what is dear and does not depend on all that the run's key says: scores that another limit needs again.
        Several runs may write into it at once, so write files by rename.
        """
        told = json.dumps([self.code, self.seed, *map(str, parts)])
        folder = self.store / f"shared-{hashlib.sha256(told.encode()).hexdigest()[:32]}"
        self.use(folder.name)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def artifact(self, name: str) -> Artifact:
        """The artifact that this pass is writing at `scratch / name`, as later passes will find it."""
        return Artifact(f"{self.key}/{name}", f"{self.key}/{name}")


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Pass(ABC):
    """Base of all passes. A subclass is made a frozen, keyword-only dataclass; its fields are the options of its text.

    Class attributes:
        name: as written in pipelines.
        kind: analysis, search, transform or lowering.
        version: raise it when the same input gives another result; it is part of the store key.
        needs: artifact kinds that must exist before, so that a pipeline fails before any work.
        gives: artifact kinds that the pass leaves; those that later passes may need.
        reads: the parts of the target that the result depends on. They are part of the store key, so declare what is
            true: a pass that reads nothing is handed no target and no backend, and its results serve every target.
        cached: False for passes whose result depends on more than their input, such as a measurement.
        measures: True for passes that can only run on the target's device, such as a profile or a bench.
        resumes: True for a pass that goes on from what a killed run of the same key left in `scratch`.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    name: ClassVar[str]
    kind: ClassVar[Kind]
    version: ClassVar[int] = 1
    needs: ClassVar[tuple[str, ...]] = ()
    gives: ClassVar[tuple[str, ...]] = ()
    reads: ClassVar[tuple[TargetPart, ...]] = ("device", "engine", "workload", "limits", "quant")
    cached: ClassVar[bool] = True
    measures: ClassVar[bool] = False
    resumes: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    @abstractmethod
    def run(self, ir: ModelIR, ctx: Context) -> PassResult:
        """Do the work. Raises AccError on bad input; anything else raised is a bug of the pass."""
