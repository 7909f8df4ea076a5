"""Small passes with every kind of option, registered the way a plug-in's are."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Literal
from unittest.mock import patch

from acc import registry
from acc.ir import Arch, Dim, ModelIR, Tensor
from acc.passes_api import Context, Pass, PassResult


class Options(Pass):
    """One option of every type."""

    name = "options"
    kind = "analysis"
    whole: int = 1
    part: float = 0.5
    text: str = "x"
    maybe: str | None = None
    flag: bool = False
    many: tuple[str, ...] = ()
    sizes: tuple[int, ...] = (1, 2)
    one_of: Literal["left", "right"] = "left"

    def run(self, ir: ModelIR, ctx: Context) -> PassResult:
        return PassResult(ir)


class Note(Pass):
    """Leaves a file, counts how often it ran."""

    name = "note"
    kind = "analysis"
    gives = ("notes",)
    reads = ()
    text: str = "x"
    ran = 0

    def run(self, ir: ModelIR, ctx: Context) -> PassResult:
        type(self).ran += 1
        (ctx.scratch / "notes").write_text(self.text)
        os.write(1, b"a library prints\n")
        ctx.progress(1, 1, "written")
        return PassResult(
            ir.with_artifacts(notes=ctx.artifact("notes")), {"text": self.text, "target": str(ctx.target)}
        )


class Read(Pass):
    """Reads what `note` left and cuts the hidden dim by one."""

    name = "read"
    kind = "transform"
    needs = ("notes",)
    reads = ("limits",)

    def run(self, ir: ModelIR, ctx: Context) -> PassResult:
        text = ctx.path(ir.artifacts["notes"]).read_text()
        return PassResult(
            ir.resize({"hidden": ir.size("hidden") - 1}), {"text": text, "before": dict(ctx.facts["note"])}
        )


class Bad(Pass):
    """Breaks the contract in the way it is told to."""

    name = "bad"
    kind = "analysis"
    gives = ("promised",)
    way: Literal["raise", "lie", "mutate", "facts", "disk", "interrupt", "broken-ir", "sleep"] = "raise"

    def run(self, ir: ModelIR, ctx: Context) -> PassResult:
        (ctx.scratch / "half").write_text("half")
        if self.way == "raise":
            raise ValueError("seven is not a name")
        if self.way == "disk":
            raise OSError(28, "No space left on device")
        if self.way == "interrupt":
            raise KeyboardInterrupt
        if self.way == "sleep":
            time.sleep(600)
        if self.way == "mutate":
            ir.config["hidden_size"] = 3  # type: ignore[index]
        if self.way == "broken-ir":
            return PassResult(ir.with_arch(Arch({"hidden": 99})))
        facts = {"bad": object()} if self.way == "facts" else {}
        promised = ir if self.way == "lie" else ir.with_artifacts(promised=ctx.artifact("half"))
        return PassResult(promised, facts)


@contextmanager
def registered() -> Iterator[None]:
    """The passes above beside the installed ones, as if a package offered them."""
    real = metadata.entry_points
    own = [
        metadata.EntryPoint(cls.name, f"{__name__}:{cls.__name__}", "acc.passes") for cls in (Options, Note, Read, Bad)
    ]

    def both(*, group: str) -> list[metadata.EntryPoint]:
        return [*real(group=group), *(own if group == "acc.passes" else ())]

    with patch.object(metadata, "entry_points", both), patch.dict(registry.passes()._loaded):
        yield


def tiny_ir() -> ModelIR:
    """Two tensors over two dims."""
    dims = {"hidden": Dim("hidden", "hidden", 8), "vocab": Dim("vocab", "vocab", 16)}
    embed = Tensor("embed.weight", ((("vocab",),), (("hidden",),)), "F32")
    norm = Tensor("norm.weight", ((("hidden",),),), "F32")
    return ModelIR("tiny", {"hidden_size": 8}, dims, {one.name: one for one in (embed, norm)})
