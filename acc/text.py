"""The text form of the IR, for people: it prints, parses back to the same value, and makes good diffs.

    model llama                                   # 13176 of 13176 parameters
      hidden_size = 24                            # the configuration, one key a line, values in JSON
    dim hidden : hidden = 24                      # name, role, size
    dim ffn.0 : ffn = 20 / 48 in model.layers.0   # kept of traced, and where it belongs
    dim head_dim : head_dim = 4 pinned "why"
    tensor lm_head.weight F32 [vocab, hidden]     # one axis per dimension: products of dims ...
    tensor q.weight F32 [kv_group.0*q_per_kv.0*head_dim, hidden] if layer.0, attn.0
    tensor qkv.weight F32 [a*head_dim + b*head_dim, hidden] as qkv.tied rescale hidden^0.5 offset 1.0
    keep ffn.0 = 0-9, 20-29                       # ... and concatenations of them
    op linear = aten.linear.default(embedding, q.weight) -> [1, 7, 24]
    artifact weights "path" "digest"

`#` starts a comment. Names with unusual characters stand in JSON quotes.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, cast, get_args

from acc.diag import AccError
from acc.ir import Arch, Artifact, Axis, Dim, ModelIR, Op, Rescale, Role, Segment, State, Tensor

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|->|[\[\](),*+=:/^]|[^\s\[\](),*+=:/^"#]+')
_PLAIN = re.compile(r"[^\s\[\](),*+=:/^\"#]+")


# Printing ------------------------------------------------------------------------------------------------------------


def format(ir: ModelIR, *, ops: bool = True) -> str:
    """The text of an IR.

    Args:
        ops: whether to print the graph, which is most of the text.
    """
    return "\n".join(_lines(ir, ops)) + "\n"


def _lines(ir: ModelIR, ops: bool) -> Iterator[str]:
    whole = ir.with_arch(Arch()).parameters()
    yield f"model {_name(ir.family)}  # {ir.parameters()} of {whole} parameters"
    yield from (f"  {_name(key)} = {json.dumps(value)}" for key, value in ir.config.items())
    yield ""
    yield from (_dim(ir, dim) for dim in ir.dims.values())
    yield ""
    yield from (_tensor(tensor) for tensor in ir.tensors.values())
    if ir.arch.keep:
        yield ""
    yield from (f"keep {_name(name)} = {_ranges(kept)}" for name, kept in ir.arch.keep.items())
    if ops and ir.ops:
        yield ""
        yield from (_op(op) for op in ir.ops)
    if ir.artifacts:
        yield ""
    for kind, one in ir.artifacts.items():
        yield f"artifact {_name(kind)} {json.dumps(one.path)} {json.dumps(one.digest)}"


def _name(name: str) -> str:
    plain = _PLAIN.fullmatch(name) and name != "->" and not name.isdigit()
    return name if plain else json.dumps(name)


def _names(names: Sequence[str]) -> str:
    return ", ".join(map(_name, names))


def _dim(ir: ModelIR, dim: Dim) -> str:
    kept = f"{ir.arch.sizes[dim.name]} / " if dim.name in ir.arch.sizes else ""
    scope = f" in {_name(dim.scope)}" if dim.scope else ""
    state = f" {dim.state}" if dim.state != "free" or dim.why else ""
    why = f" {json.dumps(dim.why)}" if dim.why else ""
    return f"dim {_name(dim.name)} : {dim.role} = {kept}{dim.size}{scope}{state}{why}"


def _tensor(tensor: Tensor) -> str:
    parts = [f"tensor {_name(tensor.name)} {_name(tensor.dtype)} [{', '.join(map(_axis, tensor.axes))}]"]
    if tensor.presence:
        parts.append(f"if {_names(tensor.presence)}")
    if tensor.aliases:
        parts.append(f"as {_names(tensor.aliases)}")
    if tensor.rescale:
        scale = tensor.rescale
        parts.append(f"rescale {_name(scale.dim)}^{scale.power!r} offset {scale.offset!r}")
    return " ".join(parts)


def _axis(axis: Axis) -> str:
    return " + ".join("*".join(map(_name, segment)) if segment else "1" for segment in axis) if axis else "0"


def _op(op: Op) -> str:
    shape = ", ".join(map(str, op.shape))
    return f"op {_name(op.name)} = {_name(op.target)}({_names(op.inputs)}) -> [{shape}]"


def _ranges(kept: Sequence[int]) -> str:
    """Indices as runs: `0-9, 12, 20-29`."""
    runs = []
    for _, run in itertools.groupby(enumerate(kept), lambda pair: pair[1] - pair[0]):
        members = [index for _, index in run]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ", ".join(runs)


# Parsing -------------------------------------------------------------------------------------------------------------


class _Line:
    """The tokens of one line, read from left to right."""

    def __init__(self, number: int, content: str) -> None:
        self.number = number
        self.tokens = list(self._tokens(content))

    def _tokens(self, content: str) -> Iterator[str]:
        place = 0
        while place < len(content):
            if content[place].isspace():
                place += 1
                continue
            if content[place] == "#":
                return
            match = _TOKEN.match(content, place)
            if match is None:
                raise self.error(f"cannot read {content[place:][:20]!r}")
            yield match[0]
            place = match.end()

    def error(self, message: str) -> AccError:
        return AccError.of("ACC220", f"line {self.number}", message, "`acc/text.py` shows the form")

    def next(self, what: str) -> str:
        if not self.tokens:
            raise self.error(f"ends where {what} should stand")
        return self.tokens.pop(0)

    def accept(self, token: str) -> bool:
        found = bool(self.tokens) and self.tokens[0] == token
        if found:
            self.tokens.pop(0)
        return found

    def expect(self, token: str) -> None:
        found = self.next(f"`{token}`")
        if found != token:
            raise self.error(f"has `{found}` where `{token}` should stand")

    def name(self, what: str = "a name") -> str:
        token = self.next(what)
        if token.startswith('"'):
            return str(json.loads(token))
        if not _PLAIN.fullmatch(token):
            raise self.error(f"has `{token}` where {what} should stand")
        return token

    def number_of(self, what: str, kind: type[int] | type[float] = int) -> Any:
        token = self.next(what)
        try:
            return kind(token)
        except ValueError:
            raise self.error(f"has `{token}` where {what} should stand") from None

    def list(self, read: Any, end: str = "") -> tuple[Any, ...]:
        """Comma-separated elements up to `end`, or while commas follow."""
        found: list[Any] = []
        while not (end and self.accept(end)):
            if found:
                self.expect(",")
            found.append(read())
            if not end and (not self.tokens or self.tokens[0] != ","):
                break
        return tuple(found)

    def done(self) -> None:
        if self.tokens:
            raise self.error(f"has `{self.tokens[0]}` where nothing more should stand")


class _Parser:
    """What has been read so far."""

    def __init__(self) -> None:
        self.family = ""
        self.config: dict[str, Any] = {}
        self.dims: dict[str, Dim] = {}
        self.sizes: dict[str, int] = {}
        self.keep: dict[str, tuple[int, ...]] = {}
        self.tensors: dict[str, Tensor] = {}
        self.ops: list[Op] = []
        self.artifacts: dict[str, Artifact] = {}

    def read(self, number: int, content: str) -> None:
        if content[:1].isspace() and content.strip():
            self._key(number, content)
            return
        line = _Line(number, content)
        if not line.tokens:
            return
        word = line.next("a word")
        readers = {
            "model": self._model,
            "dim": self._dim,
            "tensor": self._tensor,
            "keep": self._keep,
            "op": self._op,
            "artifact": self._artifact,
        }
        if word not in readers:
            raise line.error(f"starts with `{word}`, not with {', '.join(readers)}")
        readers[word](line)
        line.done()

    def _key(self, number: int, content: str) -> None:
        """`  key = JSON` of the configuration; the value is read by the JSON decoder, so `#` may stand in it."""
        head, equals, value = content.partition(" = ")
        line = _Line(number, head)
        if not line.tokens:
            return
        key = line.name()
        line.done()
        try:
            if not equals:
                raise ValueError("no ` = `")
            self.config[key], end = json.JSONDecoder().raw_decode(value)
        except ValueError as error:
            raise line.error(f"the value of `{key}` is not JSON: {error}") from None
        _Line(number, value[end:]).done()

    def _model(self, line: _Line) -> None:
        self.family = line.name()

    def _dim(self, line: _Line) -> None:
        name = line.name()
        line.expect(":")
        role = line.name("a role")
        line.expect("=")
        size = line.number_of("a size")
        if line.accept("/"):
            self.sizes[name], size = size, line.number_of("the traced size")
        scope = line.name("a module path") if line.accept("in") else ""
        state = line.name() if line.tokens else "free"
        why = line.name() if line.tokens else ""
        if role not in get_args(Role) or state not in get_args(State):
            raise line.error(f"has an unknown role or state: `{role}`, `{state}`")
        self._once(line, self.dims, name, Dim(name, cast(Role, role), size, scope, cast(State, state), why))

    def _tensor(self, line: _Line) -> None:
        name, dtype = line.name(), line.name("a dtype")
        line.expect("[")
        axes = line.list(lambda: self._axis(line), "]")
        presence = line.list(line.name) if line.accept("if") else ()
        aliases = line.list(line.name) if line.accept("as") else ()
        rescale = None
        if line.accept("rescale"):
            dim = line.name()
            line.expect("^")
            power = line.number_of("a power", float)
            line.expect("offset")
            rescale = Rescale(dim, power, line.number_of("an offset", float))
        self._once(line, self.tensors, name, Tensor(name, axes, dtype, presence, aliases, rescale))

    def _axis(self, line: _Line) -> Axis:
        if line.accept("0"):
            return ()
        segments = [self._segment(line)]
        while line.accept("+"):
            segments.append(self._segment(line))
        return tuple(segments)

    def _segment(self, line: _Line) -> Segment:
        if line.accept("1"):
            return ()
        names = [line.name("a dim")]
        while line.accept("*"):
            names.append(line.name("a dim"))
        return tuple(names)

    def _keep(self, line: _Line) -> None:
        name = line.name()
        line.expect("=")
        runs = line.list(lambda: self._run(line)) if line.tokens else ()
        self._once(line, self.keep, name, tuple(itertools.chain.from_iterable(runs)))

    def _run(self, line: _Line) -> range:
        token = line.next("indices")
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", token)
        if match is None:
            raise line.error(f"has `{token}` where indices such as `3` or `0-9` should stand")
        return range(int(match[1]), int(match[2] or match[1]) + 1)

    def _op(self, line: _Line) -> None:
        name = line.name()
        line.expect("=")
        target = line.name()
        line.expect("(")
        inputs = line.list(line.name, ")")
        line.expect("->")
        line.expect("[")
        self.ops.append(Op(name, target, inputs, line.list(lambda: line.number_of("a size"), "]")))

    def _artifact(self, line: _Line) -> None:
        kind = line.name()
        self._once(line, self.artifacts, kind, Artifact(line.name(), line.name()))

    def _once(self, line: _Line, table: dict[str, Any], name: str, value: Any) -> None:
        if name in table:
            raise line.error(f"`{name}` stands here a second time")
        table[name] = value


def parse(content: str) -> ModelIR:
    """The IR that a text says; the inverse of `format`.

    Raises:
        AccError: with the line that cannot be read. What the IR means is checked by `acc.verify`.
    """
    parser = _Parser()
    for number, line in enumerate(content.splitlines(), 1):
        parser.read(number, line)
    if not parser.family:
        raise AccError.of("ACC220", "the text", "has no `model` line", "`acc/text.py` shows the form")
    arch = Arch(parser.sizes, parser.keep)
    return ModelIR(parser.family, parser.config, parser.dims, parser.tensors, tuple(parser.ops), arch, parser.artifacts)
