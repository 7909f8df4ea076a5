"""`acc doctor`: what is usable on this machine, and how to get the rest, asked of every backend."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acc import machine, registry, targetfiles
from acc.backend_api import EngineInfo
from acc.console import tell
from acc.diag import AccError, Diagnostic
from acc.quantity import written


@dataclass(frozen=True)
class Examination:
    """What was found: engines, and findings of backends, plug-ins and the machine."""

    engines: tuple[EngineInfo, ...]
    findings: tuple[Diagnostic, ...]

    @property
    def usable(self) -> bool:
        """Whether at least one engine can be used."""
        return bool(self.engines)

    def to_json(self) -> dict[str, Any]:
        """A JSON value."""
        return {"engines": [vars(one) for one in self.engines], "findings": [vars(one) for one in self.findings]}

    def show(self) -> None:
        """Engines on stdout, findings on stderr."""
        size = written(machine.memory_bytes(), "B")
        print(
            f"{machine.processor()}, {machine.threads()} threads, {size}; GPUs: {', '.join(machine.gpus()) or 'none'}"
        )
        for one in self.engines:
            print(f"{one.engine} {one.version} ({one.origin}): {one.path}")
            print(f"    can: {', '.join(one.can)}; built with: {one.build}")
        tell(self.findings)


def examine() -> Examination:
    """Ask every backend; one that cannot be imported is a finding."""
    engines: list[EngineInfo] = []
    findings = [*registry.passes().collisions(), *registry.backends().collisions(), *targetfiles.faults()]
    for name in registry.backends().names():
        try:
            backend = registry.backends().load(name)()
            engines += backend.engines()
            findings += backend.doctor()
        except AccError as error:
            findings += error.diagnostics
    for name in registry.passes().names():
        try:
            registry.passes().load(name)
        except AccError as error:
            findings += error.diagnostics
    return Examination(tuple(engines), tuple(dict.fromkeys(findings)))


def build_engine(backend: str, source: Path | None) -> None:
    """Build an engine. Raises AccError ACC340 if the backend has no engine that can be built."""
    found = registry.backends().load(backend)()
    found.build(source)
