"""The exported graph of a model, with the axes of every value in it."""

from __future__ import annotations

import contextlib
import io
import logging
import operator
import re
import traceback
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import acc.trace.rules  # noqa: F401  the rules register themselves
from acc.diag import AccError
from acc.trace.axes import new, unify
from acc.trace.calls import Call, Result, Value, apply

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram
    from torch.fx import Node
    from transformers import PreTrainedModel

TOKENS = 7
"""Length of the traced input; its value reaches no tensor."""

SAME = ("aten.to.", "aten.alias.", "aten.clone.", "aten.contiguous.", "aten.dropout.", "aten.type_as.", "aten.detach.")
"""Ops that return the values that they read."""

_NO_VALUE = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range")


@dataclass(frozen=True)
class Graph:
    """The exported graph with the axes of every value.

    Attributes:
        nodes: in execution order, without those that nothing uses.
        results: the axes of each node's value.
        stored: the stored tensor that a placeholder stands for, by its first name.
        buffers: the buffer that is not stored, such as rope frequencies, that a placeholder stands for.
        output: the node of the logits.
        tensors: axes of each stored tensor, by its first name, in the order of the state dict.
        aliases: further names of tied tensors.
        layers: the module path of the list of decoder layers.
    """

    nodes: tuple[Node, ...]
    results: dict[Node, Result]
    stored: dict[Node, str]
    buffers: dict[Node, str]
    output: Node
    tensors: dict[str, Value]
    aliases: dict[str, tuple[str, ...]]
    layers: str

    def value(self, node: Any) -> Value:
        """The axes of a node that returns one tensor."""
        found = self.results[node]
        assert isinstance(found, Value)
        return found

    def layer_of(self, path: str) -> int | None:
        """The layer that a module path or tensor name lies in."""
        match = re.match(re.escape(self.layers) + r"\.(\d+)(\.|$)", path)
        return int(match[1]) if match else None


# Export --------------------------------------------------------------------------------------------------------------


def export(config_json: dict[str, Any]) -> tuple[ExportedProgram, PreTrainedModel]:
    """Export the model's logits for one short prompt, on meta tensors."""
    import torch

    from acc.model import build

    class Logits(torch.nn.Module):
        def __init__(self, model: PreTrainedModel) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.model(input_ids=input_ids, use_cache=False).logits
            return logits

    said = io.StringIO()  # on failure the exporter prints the whole graph so far; its last op is what we want of it
    try:
        with torch.device("meta"), torch.no_grad(), contextlib.redirect_stderr(said), _quiet():
            model = build(config_json)
            ids = torch.zeros(1, TOKENS, dtype=torch.long)
            program = torch.export.export(Logits(model), (ids,), strict=False)
    except AccError:
        raise
    except Exception as error:  # the exporter raises whatever the model's code raises
        raise _does_not_export(str(config_json["model_type"]), error, said.getvalue()) from error
    return program, model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's warnings, meant for its own developers, from the user."""
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _does_not_export(family: str, error: Exception, said: str) -> AccError:
    ops = re.findall(r"torch\.ops\.(aten\.\w+(?:\.\w+)?)\(", said)
    own = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename and f.line]
    culprit = f"op `{ops[-1]}`" if ops else f"`{type(error).__name__}`"
    place = f" at `{own[-1].line}` ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return AccError.of(
        "ACC201",
        family,
        f"the model does not export: {culprit}{place}: {first[:160]}",
        "without its graph nothing can be cut; lowering and quantizing the whole model remain possible",
    )


# Solving -------------------------------------------------------------------------------------------------------------


def solve(program: ExportedProgram, model: PreTrainedModel) -> Graph:
    """Run the op rules over the exported graph."""
    import torch

    first, aliases, shapes = _state(model)
    tensors = {name: Value(tuple(new(n) for n in shape)) for name, shape in shapes.items()}
    signature = program.graph_signature
    parameters = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    live = _live(program)
    output: Any = program.graph.output_node().args[0]
    graph = Graph(tuple(live), {}, {}, {}, output[0], tensors, aliases, _layers_path(model))
    for node in live:
        if node.op == "placeholder":
            target = parameters.get(node.name, "").removeprefix("model.")
            graph.results[node] = _input(graph, node, target, first.get(target))
        elif node.op == "call_function":
            args, kwargs = (_with_values(graph, tree) for tree in (node.args, node.kwargs))
            graph.results[node] = apply(Call(target_of(node), path_of(node), args, kwargs, shapes_of(node)))
        elif isinstance(node.meta.get("val"), torch.Tensor):
            graph.results[node] = _constant(node)
    _join_vocabulary(graph)
    return graph


def _with_values(graph: Graph, tree: Any) -> Any:
    """The arguments of a node with the axes of each node in its place."""
    from torch.fx.node import map_arg

    return map_arg(tree, lambda node: graph.results.get(node))  # type: ignore[arg-type,return-value]


def _state(model: PreTrainedModel) -> tuple[dict[str, str], dict[str, tuple[str, ...]], dict[str, tuple[int, ...]]]:
    """Every stored name with its first name, the aliases of each first name, and the shapes."""
    owners: dict[int, str] = {}
    first: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    aliases: dict[str, list[str]] = defaultdict(list)
    for name, tensor in model.state_dict(keep_vars=True).items():
        first[name] = owners.setdefault(id(tensor), name)
        if first[name] != name:
            aliases[first[name]].append(name)
        else:
            shapes[name] = tuple(tensor.shape)
    return first, {name: tuple(others) for name, others in aliases.items()}, shapes


def _layers_path(model: PreTrainedModel) -> str:
    from acc.model import decoder_layers

    layers = decoder_layers(model)
    return next(str(name) for name, module in model.named_modules() if module is layers)


def _live(program: ExportedProgram) -> list[Node]:
    """The nodes that the logits depend on, operands first.

    The order follows from the graph alone: a model that builds things in a `set` (Gemma its rotary tables) exports its
    nodes in another order in every process.
    """
    found: dict[Node, None] = {}
    todo = [(program.graph.output_node(), False)]
    while todo:
        node, ready = todo.pop()
        if ready:
            found.setdefault(node)
        elif node not in found:
            todo += [(node, True), *((operand, False) for operand in reversed(node.all_input_nodes))]
    return [node for node in found if node.op != "output" and not target_of(node).startswith(_NO_VALUE)]


def _input(graph: Graph, node: Node, target: str, stored: str | None) -> Value:
    if stored is not None:
        graph.stored[node] = stored
        return graph.tensors[stored]
    if target:
        graph.buffers[node] = target
    return _constant(node, f"the code computes `{target}` from the configuration" if target else "the input's own size")


def _constant(node: Node, why: str = "a constant of the code") -> Value:
    return Value(tuple(new(n, pinned=why) for n in shapes_of(node)[0]))


def shapes_of(node: Node) -> list[tuple[int, ...]]:
    """The concrete shapes of what a node returns."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return [tuple(int(n) for n in getattr(one, "shape", ())) for one in values]


def target_of(node: Node) -> str:
    """The name of a node's op, such as `aten.linear.default`."""
    return "getitem" if node.target is operator.getitem else str(node.target)


def path_of(node: Node) -> str:
    """The path of the module that a node was called in."""
    stack = node.meta.get("nn_module_stack") or {"": ("", None)}
    return str(list(stack.values())[-1][0]).removeprefix("model").removeprefix(".")


def token_tables(graph: Graph) -> list[Node]:
    """The embedding ops that look up the input tokens themselves."""
    return [
        node
        for node in graph.nodes
        if target_of(node) == "aten.embedding.default"
        and (source := _source_of_indices(node)).op == "placeholder"
        and source not in graph.stored
    ]


def _source_of_indices(node: Node) -> Node:
    source = node.all_input_nodes[1]
    while target_of(source).startswith((*SAME, "aten.view.", "aten.reshape.")):
        source = source.all_input_nodes[0]
    return source


def _join_vocabulary(graph: Graph) -> None:
    """The ids that a model reads and those that it writes are one vocabulary, tied weights or not."""
    for node in token_tables(graph):
        rows = graph.value(node.args[0]).axes[0]
        unify(rows, graph.value(graph.output).axes[-1], "the input's and the output's vocabulary do not match")
