"""What a result depends on besides its input: the code that made it, libraries, parts of the target that it reads."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterator
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acc import pipeline

if TYPE_CHECKING:
    from acc.ir import ModelIR
    from acc.passes_api import Pass
    from acc.target import Target

LIBRARIES = ("torch", "transformers", "gguf", "safetensors", "numpy", "scipy")
_NOT_CODE = {"codes.toml", "efforts.toml"}  # texts for people and presets


def stage_key(one: Pass, ir: ModelIR, *, target: Target | None, engine: str, seed: int) -> str:
    """The store key of running a pass on an IR: its name and 128 bits over everything that the result depends on.

    Args:
        engine: name, version and build of the engine; counts only for passes that read the engine.
    """
    parts = {
        "input": ir.digest(),
        "pass": pipeline.spec(one),
        "files": named_files(one),
        "version": one.version,
        "code": code_digest(type(one).__module__),
        "libraries": {name: version(name) for name in LIBRARIES},
        "engine": engine if "engine" in one.reads else "",
        "target": target_parts(one, target),
        "seed": seed,
    }
    return f"{one.name}-{hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]}"


def named_files(one: Pass) -> dict[str, str]:
    """The sha256 of every file that an option of the pass names."""
    found = {}
    for option in dataclasses.fields(one):
        value = getattr(one, option.name)
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, (str, Path)) and str(item) and Path(item).is_file():
                with Path(item).open("rb") as file:
                    found[str(item)] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def target_parts(one: Pass, target: Target | None) -> dict[str, Any]:
    """The parts of the target that a pass declares to read, as JSON."""
    if target is None:
        return {}
    whole = dataclasses.asdict(target)
    named: dict[str, Any] = {part: whole[part] for part in one.reads}
    if "engine" in one.reads:
        named["engine_options"] = whole["engine_options"]
    return json.loads(json.dumps(named, sort_keys=True, default=str))  # type: ignore[no-any-return]


@cache
def version(library: str) -> str:
    """The installed version of a library, or "" if it is not here."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return ""


@cache
def code_digest(module: str) -> str:
    """A sha256 over the sources of a module and of all that it imports from its own package and from acc.

    Found by reading import statements, those inside functions too; so an edit of the report or of another pass keeps
    results, an edit of anything that the pass may call does not. Data files beside the sources count as code.
    """
    packages = {"acc", module.partition(".")[0]}
    sources: dict[str, bytes] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in sources:
            continue
        path = _source(name)
        sources[name] = path.read_bytes() if path else b""
        if path:
            found = _imports(sources[name], name, is_package=path.name == "__init__.py")
            waiting += [one for one in found if one.partition(".")[0] in packages]
            for data in _data_files(path.parent):
                sources[str(data.relative_to(path.parent)) + "@" + name.rpartition(".")[0]] = data.read_bytes()
    digest = hashlib.sha256()
    for name in sorted(sources):
        digest.update(name.encode() + b"\0" + hashlib.sha256(sources[name]).digest())
    return digest.hexdigest()


def _source(module: str) -> Path | None:
    """The file of a module, without importing it where that can be helped; None if the name is no module."""
    loaded = sys.modules.get(module)
    if loaded is not None and getattr(loaded, "__file__", None):
        return Path(str(loaded.__file__))
    try:
        found = util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return Path(found.origin) if found and found.origin and found.origin.endswith(".py") else None


def _imports(source: bytes, module: str, *, is_package: bool) -> Iterator[str]:
    """Every module that a source may import; `from a import b` may mean the module `a.b`."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _data_files(folder: Path) -> Iterator[Path]:
    yield from (path for path in sorted(folder.glob("*.toml")) if path.name not in _NOT_CODE)
    yield from (path for path in sorted(folder.glob("data/*")) if path.is_file())
