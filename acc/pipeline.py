"""Pipelines as text: `calibrate{tokens=16384},order,puzzle{tpot=0.7x},slice`, to passes and back.

    pipeline = stage ("," stage)*
    stage    = name [ "{" option ([","] option)* "}" ]
    option   = name "=" value | name                  # a name alone is true
    value    = word | "quoted string" | "[" word* "]"

Option names write `-` for `_`. The text of a pass holds only the options that differ from their defaults, so
`parse(format(p)) == p`.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from acc import registry
from acc.diag import AccError, nearest

if TYPE_CHECKING:
    from acc.passes_api import Pass

_TOKEN = re.compile(r'(?P<space>\s+)|(?P<mark>[,{}\[\]=])|(?P<quoted>"(?:[^"\\]|\\.)*")|(?P<word>[^\s,{}\[\]="]+)')
_PLAIN = re.compile(r'[^\s,{}\[\]="]+')


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    start: int
    end: int


@dataclass(frozen=True)
class _Value:
    """A value as written: a word, a quoted string, or a list of them."""

    text: str | tuple[str, ...]
    quoted: bool
    start: int
    end: int


def parse(text: str) -> tuple[Pass, ...]:
    """The passes of a pipeline text.

    Raises:
        AccError: ACC310 syntax, ACC301 unknown pass, ACC311 unknown option, ACC312 ill-typed value, ACC313 option
            twice, each with the place marked in the text.
    """
    return tuple(_Parser(text).pipeline())


def format(passes: Sequence[Pass]) -> str:
    """The text of a pipeline."""
    return ",".join(spec(one) for one in passes)


def spec(one: Pass) -> str:
    """The text of one pass: its name and the options that differ from their defaults."""
    options = [
        f"{_dashed(field.name)}={_written(getattr(one, field.name))}"
        for field in dataclasses.fields(one)
        if getattr(one, field.name) != _default(field)
    ]
    return one.name + (f"{{{','.join(options)}}}" if options else "")


def defaults(cls: type[Pass]) -> list[str]:
    """The options of a pass with their defaults, as written: `tokens=16384`."""
    return [f"{_dashed(field.name)}={_written(_default(field))}" for field in dataclasses.fields(cls)]


def efforts() -> dict[str, str]:
    """The presets of `--effort`: name to pipeline text."""
    table = tomllib.loads(resources.files("acc").joinpath("efforts.toml").read_text("utf-8"))
    return {name: "".join(text.split()) for name, text in table.items()}


def effort(name: str) -> str:
    """The pipeline text of one preset. Raises AccError ACC314 on an unknown name."""
    known = efforts()
    if name not in known:
        raise AccError.of("ACC314", "--effort", f"unknown effort `{name}`", nearest(name, known))
    return known[name]


class _Parser:
    """Recursive descent over the tokens of one text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = list(self._tokens())
        self.at = 0

    def pipeline(self) -> Iterator[Pass]:
        while True:
            yield self.stage()
            if self.peek().kind == "end":
                return
            self.expect(",", "a comma between passes")

    def stage(self) -> Pass:
        name = self.word("the name of a pass")
        try:
            cls = registry.passes().load(name.text)
        except AccError as error:
            first = error.diagnostics[0]
            if first.code != "ACC301":
                raise
            raise self.error("ACC301", f"unknown pass `{name.text}`", name, first.hint) from None
        return cls(**self.options(cls)) if self.skip("{") else cls()

    def options(self, cls: type[Pass]) -> dict[str, Any]:
        known = {_dashed(field.name): field.name for field in dataclasses.fields(cls) if field.init}
        found: dict[str, Any] = {}
        while not self.skip("}"):
            name = self.word("an option or `}`")
            field = known.get(name.text)
            if field is None:
                hint = nearest(name.text, known) if known else f"`{cls.name}` has no options"
                raise self.error("ACC311", f"pass `{cls.name}` has no option `{name.text}`", name, hint)
            if field in found:
                raise self.error("ACC313", f"option `{name.text}` is given twice", name)
            value = self.value() if self.skip("=") else _Value("true", False, name.start, name.end)
            found[field] = self.typed(cls, field, value)
            self.skip(",")
        return found

    def typed(self, cls: type[Pass], field: str, value: _Value) -> Any:
        hint = option_types(cls)[field]
        if not value.quoted and value.text == "none" and type(None) in get_args(hint):
            return None
        from pydantic import TypeAdapter, ValidationError

        try:
            return TypeAdapter(hint).validate_python(value.text)
        except ValidationError:
            written = self.text[value.start : value.end]
            message = f"option `{_dashed(field)}` of `{cls.name}` is {describe(hint)}, not `{written}`"
            raise self.error("ACC312", message, value) from None

    def value(self) -> _Value:
        token = self.take()
        if token.kind in ("word", "quoted"):
            return _Value(self.unquoted(token), token.kind == "quoted", token.start, token.end)
        if token.text != "[":
            raise self.error("ACC310", "expected a value", token)
        items: list[str] = []
        while not self.skip("]"):
            item = self.take()
            if item.kind not in ("word", "quoted"):
                raise self.error("ACC310", "expected a value or `]`", item)
            items.append(self.unquoted(item))
            self.skip(",")
        return _Value(tuple(items), False, token.start, self.tokens[self.at - 1].end)

    def unquoted(self, token: _Token) -> str:
        return re.sub(r"\\(.)", r"\1", token.text[1:-1], flags=re.DOTALL) if token.kind == "quoted" else token.text

    def peek(self) -> _Token:
        return self.tokens[self.at]

    def take(self) -> _Token:
        token = self.tokens[self.at]
        self.at += token.kind != "end"
        return token

    def skip(self, mark: str) -> bool:
        found = self.peek().kind == "mark" and self.peek().text == mark
        self.at += found
        return found

    def expect(self, mark: str, what: str) -> None:
        if not self.skip(mark):
            raise self.error("ACC310", f"expected {what}", self.peek())

    def word(self, what: str) -> _Token:
        token = self.take()
        if token.kind != "word":
            raise self.error("ACC310", f"expected {what}", token)
        return token

    def _tokens(self) -> Iterator[_Token]:
        at = 0
        while at < len(self.text):
            match = _TOKEN.match(self.text, at)
            if match is None:
                raise self.error("ACC310", "the quoted string has no end", _Token("bad", "", at, len(self.text)))
            kind = match.lastgroup or ""
            if kind != "space":
                yield _Token(kind, match.group(), match.start(), match.end())
            at = match.end()
        yield _Token("end", "", len(self.text), len(self.text))

    def error(self, code: str, message: str, at: _Token | _Value, hint: str = "") -> AccError:
        line_start = self.text.rfind("\n", 0, at.start) + 1
        line = self.text[line_start:].split("\n", 1)[0]
        width = max(1, min(at.end, line_start + len(line)) - at.start)
        caret = " " * (at.start - line_start) + "^" * width
        return AccError.of(code, "pipeline", f"{message}\n\n    {line}\n    {caret}", hint)


@cache
def option_types(cls: type[Pass]) -> dict[str, Any]:
    """The type of each option of a pass, by field name."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def describe(hint: Any) -> str:
    """A type in a user's words."""
    if hint in (int, float, str, bool):
        return {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if str(origin) == "typing.Literal":
        return "one of " + ", ".join(f"`{value}`" for value in arguments)
    if origin in (tuple, list):
        return f"a list `[...]` of which each is {describe(arguments[0])}"
    if origin is Union or type(hint).__name__ in ("UnionType", "Union"):
        return " or ".join("`none`" if part is type(None) else describe(part) for part in arguments)
    return f"a {getattr(hint, '__name__', str(hint)).lower()}"


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "none"
    if isinstance(value, (tuple, list)):
        return "[" + " ".join(_written(item) for item in value) + "]"
    if isinstance(value, (int, float)):
        return repr(value)
    text = str(value)
    if _PLAIN.fullmatch(text) and text != "none":
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _dashed(name: str) -> str:
    return name.replace("_", "-")
