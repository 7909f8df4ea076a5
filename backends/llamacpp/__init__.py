"""llama.cpp: GGUF files, one host architecture per family, run through its C library in a child process.

This module is imported by `acc --help`: everything heavy is imported by the method that needs it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from acc.backend_api import Backend

if TYPE_CHECKING:
    from acc.backend_api import Check, CostModel, EngineInfo, LoweringPlan
    from acc.backends.llamacpp.bench_tool import BenchSession
    from acc.backends.llamacpp.session import LlamaSession
    from acc.cost import CostTable
    from acc.diag import Diagnostic
    from acc.ir import Artifact, ModelIR
    from acc.passes_api import Context
    from acc.target import Target
    from acc.validation import ValidationResult


class LlamaCpp(Backend):
    """llama.cpp through libllama, wherever it comes from."""

    name: ClassVar[str] = "llamacpp"
    artifact: ClassVar[str] = "gguf"

    def engines(self) -> list[EngineInfo]:
        """Usable installations: the user's folder, what acc built, the wheel."""
        from acc.backends.llamacpp.discover import usable

        return usable({})[0]

    def engine(self, target: Target) -> EngineInfo | None:
        """The installation that this target's options name, or the preferred one here; None if there is none."""
        from acc.backends.llamacpp.discover import preferred

        return preferred(target.engine_options)

    def serve(self, artifact: Path, target: Target) -> tuple[str, ...]:
        """Commands that serve a GGUF file in this engine."""
        from acc.backends.llamacpp.serve import serve

        return serve(artifact, target)

    def doctor(self) -> list[Diagnostic]:
        """What is missing, unusable or slower than it could be, each with the command that mends it."""
        from acc.backends.llamacpp.doctor import doctor

        return doctor()

    def build(self, source: Path | None = None) -> EngineInfo:
        """Build llama.cpp for this machine; minutes, resumable."""
        from acc.backends.llamacpp.build import build_shown

        return build_shown(source)

    def check(self, ir: ModelIR, target: Target) -> Check:
        """Which host architecture would hold this model, and the sizes that llama.cpp runs fast."""
        from acc.backends.llamacpp.plan import check

        return check(ir, target)

    def plan(self, ir: ModelIR, quant: str) -> LoweringPlan:
        """What `lower` would write for this Arch, to the byte."""
        from acc.backends.llamacpp.plan import plan

        return plan(ir, quant)

    def lower(
        self, ir: ModelIR, weights: Path, quant: str, out: Path, ctx: Context, moments: Path | None = None
    ) -> LoweringPlan:
        """Write a GGUF file."""
        from acc.backends.llamacpp.lower import lower

        return lower(ir, weights, quant, out, ctx, moments)

    def dequantized(self, artifact: Path, weights: Path, out: Path, ir: ModelIR) -> None:
        """Write the Hugging Face folder that holds exactly the weights of a GGUF file."""
        from acc.backends.llamacpp.dequantize import dequantized

        dequantized(artifact, weights, out, ir)

    def imitate(self, model: Any, artifact: Path, ir: ModelIR) -> None:
        """Let a PyTorch model round its activations to 8 bits where llama.cpp does."""
        from acc.backends.llamacpp.rounding import imitate

        imitate(model, artifact, ir)

    def open(
        self, artifact: Path, target: Target, *, context: int, batch: int = 1
    ) -> AbstractContextManager[LlamaSession | BenchSession]:
        """Load a GGUF file in a child process, in the engine that the target names or the preferred one here."""
        from acc.backends.llamacpp.session import open_session

        return open_session(artifact, target, context=context, batch=batch)

    def profile(self, ir: ModelIR, target: Target, ctx: Context) -> Artifact:
        """Measure the cost table for this family's shapes on this device."""
        from acc.backends.llamacpp.profile import profile

        return profile(ir, target, ctx)

    def validate(
        self, ir: ModelIR, target: Target, ctx: Context, table: CostTable | None, count: int = 10
    ) -> tuple[CostTable, ValidationResult]:
        """Compare predictions with measurements on random architectures outside the fit."""
        from acc.backends.llamacpp.validate import validate

        return validate(ir, target, ctx, table, count)

    def cost_model(self, table: Path | None, ir: ModelIR, target: Target) -> CostModel:
        """The cost model of a table, or an estimate from the device's data sheet."""
        from acc.backends.llamacpp.cost import cost_model

        return cost_model(table, ir, target)
