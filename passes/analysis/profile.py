"""The cost table that the search and the report predict from: given, found in the store, or measured here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
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
        validate: measure anew, architectures outside the fit in the same rounds, and keep the errors with the table.
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
        table, origin, facts = self._found(ir.with_arch(Arch()), ctx)
        file = ctx.scratch / "table.json"
        table.save(file)
        artifact = Artifact(ctx.artifact(file.name).path, hashlib.sha256(file.read_bytes()).hexdigest())
        told = {"samples": len(table.samples), "formats": list(table.formats()), "noise": table.provenance.noise}
        facts = {"origin": origin, **told, **facts, "provenance": asdict(table.provenance)}
        return PassResult(ir.with_artifacts(table=artifact), facts)

    def _found(self, parent: ModelIR, ctx: Context) -> tuple[CostTable, str, Mapping[str, Any]]:
        """The table, whether it was `given`, `stored` or `measured`, and what a validation found."""
        assert ctx.target is not None
        assert ctx.backend is not None
        given = CostTable.load(Path(self.table)) if self.table else None
        if given and not self.validate:
            return given, "given", {}
        kept = ctx.store / self._key(parent, ctx) / "table.json"
        if self.validate:
            table, result = ctx.backend.validate(parent, ctx.target, ctx, given, self.count)
            table = table.validated(result.validation())
            if not given:
                _keep(table, kept)
            return table, "given" if given else "measured", result.to_json()
        if kept.is_file():
            return CostTable.load(kept), "stored", {}
        measured = ctx.backend.profile(parent, ctx.target, ctx)
        table = CostTable.load(ctx.scratch / Path(measured.path).name)
        _keep(table, kept)
        return table, "measured", {}

    def _key(self, parent: ModelIR, ctx: Context) -> str:
        assert ctx.target is not None
        assert ctx.backend is not None
        target = replace(ctx.target, limits=(), name="")
        engines = [asdict(one) for one in ctx.backend.engines()]
        told = [parent.family, asdict(parent.model_shape()), asdict(target), engines, ctx.seed]
        told.append(code_digest(type(ctx.backend).__module__))
        digest = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()
        return f"table-{digest[:32]}"


def _keep(table: CostTable, file: Path) -> None:
    """Leave a table in the store for pipelines that calibrate otherwise."""
    file.parent.mkdir(exist_ok=True)
    table.save(file)
