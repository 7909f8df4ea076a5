"""What can be named: passes, backends and target files, found over entry points, built-in ones like plug-ins.

Names are listed without importing anything. A plug-in that cannot be imported is a diagnostic when it is asked for, and
no harm to the others; a name that two packages claim is an error that names both.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from acc.diag import AccError, Diagnostic, nearest

if TYPE_CHECKING:
    from acc.backend_api import Backend
    from acc.passes_api import Pass

T = TypeVar("T")


class Registry(Generic[T]):
    """The things of one entry point group.

    Args:
        group: the entry point group, e.g. `acc.passes`.
        noun: what one of them is called in messages.
        base: `module:class` that a loaded class must derive from; "" for anything.
    """

    def __init__(self, group: str, noun: str, base: str = "") -> None:
        self.group, self.noun, self._base = group, noun, base
        self._loaded: dict[str, T] = {}

    def entries(self) -> Mapping[str, list[metadata.EntryPoint]]:
        """Every entry point of the group by name; more than one where packages collide."""
        found: dict[str, list[metadata.EntryPoint]] = {}
        for entry in metadata.entry_points(group=self.group):
            found.setdefault(entry.name, []).append(entry)
        return dict(sorted(found.items()))

    def names(self) -> list[str]:
        """Sorted names, nothing imported."""
        return list(self.entries())

    def collisions(self) -> list[Diagnostic]:
        """One error per name that two packages claim."""
        return [self._collision(entries) for entries in self.entries().values() if len(entries) > 1]

    def load(self, name: str) -> T:
        """Import what a name stands for.

        Raises:
            AccError: ACC301 unknown name, ACC302 claimed twice, ACC303 cannot be imported or is not what it must be.
        """
        if name not in self._loaded:
            entries = self.entries().get(name)
            if not entries:
                raise AccError.of("ACC301", name, f"unknown {self.noun}", nearest(name, self.names()))
            if len(entries) > 1:
                raise AccError(self._collision(entries))
            self._loaded[name] = self._import(entries[0])
        return self._loaded[name]

    def _collision(self, entries: list[metadata.EntryPoint]) -> Diagnostic:
        claims = " and ".join(f"`{entry.value}` of package {_package(entry)}" for entry in entries)
        return Diagnostic("ACC302", entries[0].name, f"{self.noun} is claimed by {claims}", "uninstall one of them")

    def _import(self, entry: metadata.EntryPoint) -> T:
        try:
            found = entry.load()
        except Exception as error:  # whatever a plug-in raises at import is its own fault
            raise self._broken(entry, f"cannot be imported: {type(error).__name__}: {error}") from error
        if self._base:
            module, _, attribute = self._base.partition(":")
            base = getattr(__import__(module, fromlist=[attribute]), attribute)
            if not (isinstance(found, type) and issubclass(found, base)):
                raise self._broken(entry, f"is not a subclass of {module}.{attribute}")
            if getattr(found, "name", None) != entry.name:
                own = getattr(found, "name", "")
                raise self._broken(entry, f"calls itself `{own}`, its entry point says `{entry.name}`")
        return cast(T, found)

    def _broken(self, entry: metadata.EntryPoint, why: str) -> AccError:
        message = f"{self.noun} `{entry.value}` of package {_package(entry)} {why}"
        return AccError.of("ACC303", entry.name, message, "mend or uninstall it")


def _package(entry: metadata.EntryPoint) -> str:
    return f"`{entry.dist.name} {entry.dist.version}`" if entry.dist else "unknown"


@cache
def passes() -> Registry[type[Pass]]:
    """Registry of passes."""
    return Registry("acc.passes", "pass", "acc.passes_api:Pass")


@cache
def backends() -> Registry[type[Backend]]:
    """Registry of backends."""
    return Registry("acc.backends", "backend", "acc.backend_api:Backend")
