"""The cost table that the search and the report predict from: given, found in the store, or measured here."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from acc.cost import CostTable
from acc.diag import AccError
from acc.fingerprint import code_digest
from acc.ir import Arch, Artifact, ModelIR
from acc.passes_api import Context, Pass, PassResult


class Profile(Pass):
    """Measure the cost table of this model's shapes on the target's device and engine, in its number format.

    A table depends on the family, the parent's sizes, the device, the engine, the workload's lengths and the format,
    and not on what was calibrated before: it is kept in the store under a key of these, beside the pass's own result.

    Options:
        table: a table file from elsewhere, taken instead of measuring.
        validate: measure architectures outside the fit too, and keep the errors with the table.
        count: how many of them.
    """

    name = "profile"
    kind = "analysis"
    gives = ("table",)
    reads = ("device", "engine", "workload", "quant")
    measures = True
    resumes = True
    table: str = ""
    validate: bool = False
    count: int = 10

    def run(self, ir: ModelIR, ctx: Context) -> PassResult:
        """Leave the artifact `table`.

        Facts: where it came from, its provenance, and, if asked for, predicted and measured of every held-out model.
        """
        if ctx.target is None or ctx.backend is None:
            raise AccError.of(
                "ACC603", "profile", "there is no engine to measure", "name a target: `--target cpu-llamacpp`"
            )
        parent = ir.with_arch(Arch())
        artifact, file, origin = self._table(parent, ctx)
        table = CostTable.load(file)
        facts: dict[str, Any] = {"origin": origin, "samples": len(table.samples), "formats": list(table.formats())}
        if self.validate:
            result = ctx.backend.validate(parent, ctx.target, ctx, file, self.count)
            table = table.validated(result.validation())
            table.save(ctx.scratch / "table.json")
            artifact = ctx.artifact("table.json")
            facts |= result.to_json()
        facts |= {"provenance": asdict(table.provenance), "noise": table.provenance.noise}
        return PassResult(ir.with_artifacts(table=artifact), facts)

    def _table(self, parent: ModelIR, ctx: Context) -> tuple[Artifact, Path, str]:
        """The table as an artifact, where it lies now, and whether it was `given`, `stored` or `measured`."""
        assert ctx.target is not None
        assert ctx.backend is not None
        if self.table:
            file = ctx.scratch / "table.json"
            CostTable.load(Path(self.table)).save(file)
            return ctx.artifact(file.name), file, "given"
        key = self._key(parent, ctx)
        kept = Artifact(f"{key}/table.json", key)
        if ctx.path(kept).is_file():
            return kept, ctx.path(kept), "stored"
        measured = ctx.backend.profile(parent, ctx.target, ctx)
        folder = ctx.scratch / "kept"
        folder.mkdir(exist_ok=True)
        name = Path(measured.path).name
        shutil.copyfile(ctx.scratch / name, folder / "table.json")
        shutil.rmtree(ctx.store / key, ignore_errors=True)
        folder.rename(ctx.store / key)
        return kept, ctx.path(kept), "measured"

    def _key(self, parent: ModelIR, ctx: Context) -> str:
        assert ctx.target is not None
        assert ctx.backend is not None
        target = replace(ctx.target, limits=(), name="")
        engines = [asdict(one) for one in ctx.backend.engines()]
        told = [parent.family, asdict(parent.model_shape()), asdict(target), engines, ctx.seed]
        told.append(code_digest(type(ctx.backend).__module__))
        digest = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()
        return f"table-{digest[:32]}"
