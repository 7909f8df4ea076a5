"""Targets as data: TOML files with tables `device.NAME`, `engine.NAME`, `workload.NAME` and `target.NAME`.

Files are found over entry points (`acc.targets`, whose value is a package that holds `*.toml`), and where the user
names one. A user's file may define anything anew; installed packages may not define a name twice.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module, resources
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from acc import machine
from acc.diag import AccError, Diagnostic, nearest
from acc.quantity import quantity
from acc.registry import Registry
from acc.target import Device, Limit, LimitName, Target, Workload


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DeviceTable(_Table):
    """`[device.NAME]`: `detect = "cpu"` for this machine, or data-sheet figures with their source."""

    kind: Literal["cpu", "gpu"]
    source: str = Field(min_length=1)
    detect: Literal["cpu"] | None = None
    match: str = ""
    exclude: tuple[str, ...] = ()
    memory: str = ""
    bandwidth: str = ""
    flops: dict[str, str] = {}
    threads: int = 0


class EngineTable(_Table):
    """`[engine.NAME]`: the backend, and options for it."""

    backend: str
    options: dict[str, Any] = {}


class WorkloadTable(_Table):
    """`[workload.NAME]`: tokens of prompt and output, requests at once, context to hold (0: prompt + output)."""

    prompt: int = Field(ge=1)
    output: int = Field(ge=1)
    batch: int = Field(default=1, ge=1)
    context: int = Field(default=0, ge=0)


class LimitTable(_Table):
    """`[target.NAME.limits]`, as on the command line."""

    ttft: str | None = None
    tpot: str | None = None
    throughput: str | None = None
    memory: str | None = None


class TargetTable(_Table):
    """`[target.NAME]`: names of the three, the number format, default limits, further options of the engine."""

    device: str
    engine: str
    workload: str
    quant: str = "q4_k_m"
    limits: LimitTable = LimitTable()
    options: dict[str, Any] = {}


class Tables(_Table):
    """One file, or all of them together."""

    device: dict[str, DeviceTable] = {}
    engine: dict[str, EngineTable] = {}
    workload: dict[str, WorkloadTable] = {}
    target: dict[str, TargetTable] = {}


T = TypeVar("T", bound=_Table)


def load(name: str, *, workload: str | None = None, quant: str | None = None, cache_file: Path) -> Target:
    """A target by its name, or from a user's TOML file (`mine.toml`, or `mine.toml:name` if it holds several).

    Args:
        workload: the name of a workload in place of the target's own.
        quant: a number format in place of the target's own.
        cache_file: where the measured speed of this machine is kept.

    Raises:
        AccError: ACC301 unknown name, ACC410 unreadable or ill-formed file, ACC401/402 ill-formed quantity.
    """
    tables, name = _tables_for(name)
    found = _pick(tables.target, name, "target")
    engine = _pick(tables.engine, found.engine, "engine")
    chosen = workload or found.workload
    return Target(
        name,
        _device(found.device, _pick(tables.device, found.device, "device"), cache_file),
        engine.backend,
        Workload(chosen, **_pick(tables.workload, chosen, "workload").model_dump()),
        tuple(limits(found.limits.model_dump(exclude_none=True), f"target {name}")),
        quant or found.quant,
        {**engine.options, **found.options},
    )


def limits(given: Mapping[str, str], where: str = "") -> Iterable[Limit]:
    """Limits by name as written. `where` names their place in messages; by default the option of that name."""
    names: tuple[LimitName, ...] = ("ttft", "tpot", "throughput", "memory")
    for name in names:
        if given.get(name):
            yield Limit.parse(name, given[name], f"{where}: {name}" if where else "")


@cache
def installed() -> Tables:
    """Everything that installed packages define. A package that cannot be read is left out: see `faults`."""
    return _collect()[0]


def faults() -> list[Diagnostic]:
    """What was wrong with packages of targets."""
    return _collect()[1]


@cache
def _collect() -> tuple[Tables, list[Diagnostic]]:
    registry: Registry[object] = Registry("acc.targets", "package of targets")
    merged, found = Tables(), registry.collisions()
    for entries in registry.entries().values():
        for entry in entries:
            try:
                for file in sorted(resources.files(import_module(entry.value)).iterdir(), key=lambda file: file.name):
                    if file.name.endswith(".toml"):
                        merged = _merge(merged, _read(file.read_text("utf-8"), f"{entry.value}/{file.name}"), file.name)
            except AccError as error:
                found += error.diagnostics
            except Exception as error:  # whatever a plug-in raises at import is its own fault
                message = f"cannot be imported: {type(error).__name__}: {error}"
                found.append(Diagnostic("ACC303", entry.name, f"package of targets `{entry.value}` {message}"))
    return merged, found


def _tables_for(name: str) -> tuple[Tables, str]:
    path, colon, inner = name.rpartition(":") if ".toml:" in name else (name, "", "")
    if not path.endswith(".toml"):
        return installed(), name
    try:
        own = _read(Path(path).read_text("utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise AccError.of("ACC410", path, f"cannot be read: {error}", "give a TOML file or a target's name") from None
    if not colon:
        if len(own.target) != 1:
            told = ", ".join(own.target) or "none"
            raise AccError.of("ACC410", path, f"defines {len(own.target)} targets ({told})", f"write `{path}:NAME`")
        inner = next(iter(own.target))
    base = installed()
    kinds = Tables.model_fields
    return Tables(**{kind: {**getattr(base, kind), **getattr(own, kind)} for kind in kinds}), inner


def _merge(one: Tables, other: Tables, where: str) -> Tables:
    for kind in Tables.model_fields:
        twice = set(getattr(one, kind)) & set(getattr(other, kind))
        if twice:
            raise AccError.of("ACC302", where, f"defines {kind} {', '.join(sorted(twice))}, which exists already")
    return Tables(**{kind: {**getattr(one, kind), **getattr(other, kind)} for kind in Tables.model_fields})


def _read(text: str, where: str) -> Tables:
    try:
        return Tables.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise AccError.of("ACC410", where, f"is not TOML: {error}") from None
    except ValidationError as error:
        raise AccError(*(_fault(dict(one), where) for one in error.errors())) from None


def _fault(error: dict[str, Any], where: str) -> Diagnostic:
    place = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return Diagnostic("ACC410", where, f"unknown key `{place}`", _known_keys(error["loc"]))
    message = str(error["msg"])
    return Diagnostic("ACC410", where, f"`{place}`: {message[:1].lower()}{message[1:]}")


def _known_keys(place: tuple[str | int, ...]) -> str:
    tables: dict[str, type[_Table]] = {
        "device": DeviceTable,
        "engine": EngineTable,
        "workload": WorkloadTable,
        "target": LimitTable if "limits" in place[:-1] else TargetTable,
    }
    table = tables.get(str(place[0]), Tables) if len(place) > 1 else Tables
    return nearest(str(place[-1]), table.model_fields)


def _pick(found: Mapping[str, T], name: str, noun: str) -> T:
    if name not in found:
        raise AccError.of("ACC301", name, f"unknown {noun}", nearest(name, found))
    return found[name]


def _device(name: str, table: DeviceTable, cache_file: Path) -> Device:
    if table.detect == "cpu":
        bandwidth, flops = machine.speeds(cache_file)
        count = table.threads or machine.threads()
        told = f"{machine.processor()}, {count} threads"
        return Device(told, "cpu", machine.memory_bytes(), bandwidth, {"f32": flops}, "detected", True, count)
    figures = {kind: quantity(text, "FLOP/s", f"device {name}: flops.{kind}")[0] for kind, text in table.flops.items()}
    memory, _ = quantity(table.memory, "B", f"device {name}: memory")
    bandwidth, _ = quantity(table.bandwidth, "B/s", f"device {name}: bandwidth")
    return Device(name, table.kind, int(memory), bandwidth, figures, table.source, is_here(table), table.threads)


def is_here(table: DeviceTable) -> bool:
    """Whether this machine has the device."""
    if table.detect == "cpu":
        return True
    others = [word.lower() for word in table.exclude]
    names = [name.lower() for name in machine.gpus()] if table.match else []
    return any(table.match.lower() in name and not any(word in name.split() for word in others) for name in names)
