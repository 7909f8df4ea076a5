"""Which layers and sub-blocks may be dropped: the branches that residual additions put on the stream.

The residual stream starts at the token table. Every addition of a value that was computed from the stream is a
residual addition, and what was added is a branch: with an attention op in it, `attn.i`, else `mlp.i`. Without the
branch the stream passes unchanged, so whatever the branch owns alone may go. A layer may go whole if all it does is
to add branches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from acc.ir import Dim, Role
from acc.trace.graph import SAME, Graph, target_of, token_tables

if TYPE_CHECKING:
    from torch.fx import Node

_SCALED = ("aten.mul.Tensor", "aten.div.Tensor", "aten.mul.Scalar")
_ADD = "aten.add.Tensor"


@dataclass(frozen=True)
class Branch:
    """What one residual addition adds: the nodes between the stream and the sum, and the tensors read."""

    kind: Role
    nodes: frozenset[Node]
    tensors: frozenset[str]


def find(graph: Graph, config: Mapping[str, Any]) -> tuple[dict[str, tuple[str, ...]], dict[str, Dim]]:
    """The presence dims that each tensor exists under, outermost first, and the dims themselves."""
    branches: dict[int, list[Branch]] = defaultdict(list)
    for branch in _branches(graph):
        numbers = {graph.layer_of(name) for name in branch.tensors}
        if len(numbers) == 1 and None not in numbers:
            branches[next(number for number in numbers if number is not None)].append(branch)
    exists: dict[str, tuple[str, ...]] = {}
    dims: dict[str, Dim] = {}
    for layer in sorted({n for n in map(graph.layer_of, graph.tensors) if n is not None}):
        of_layer = [name for name in graph.tensors if graph.layer_of(name) == layer]
        why = _outside(of_layer, branches[layer])
        dims[f"layer.{layer}"] = _dim(graph, "layer", layer, why)
        exists |= dict.fromkeys(of_layer, (f"layer.{layer}",))
        for kind in ("attn", "mlp"):
            alike = [branch for branch in branches[layer] if branch.kind == kind]
            if not alike:
                continue
            owned = _owned(graph, alike[0])
            dims[f"{kind}.{layer}"] = _dim(graph, kind, layer, _shared(graph, alike))
            exists |= {name: (*exists[name], f"{kind}.{layer}") for name in of_layer if name in owned}
    return exists, dims | _skipped(graph, config)


def _dim(graph: Graph, role: Role, layer: int, why: str) -> Dim:
    return Dim(f"{role}.{layer}", role, 1, f"{graph.layers}.{layer}", "pinned" if why else "free", why)


def _skipped(graph: Graph, config: Mapping[str, Any]) -> dict[str, Dim]:
    """The dims of sub-blocks that the traced model has already lost, all of size 0."""
    roles: dict[str, tuple[Role, ...]] = {"attention": ("attn", "kv_group", "q_per_kv"), "mlp": ("mlp", "ffn")}
    return {
        f"{role}.{int(layer)}": Dim(f"{role}.{int(layer)}", role, 0, f"{graph.layers}.{int(layer)}", "const")
        for layer, own in (config.get("per_layer_config") or {}).items()
        for skipped in own.get("skip", ())
        for role in roles[skipped]
    }


# The stream ----------------------------------------------------------------------------------------------------------


def _branches(graph: Graph) -> Iterator[Branch]:
    """Follow the residual stream from the token table to the logits, and yield what is added to it."""
    stream = set(token_tables(graph))
    current = set(stream)
    derived: set[Node] = set(stream)
    reads: set[Node] = set(graph.stored)  # what depends on a stored tensor, such as the gain `1 + weight` of a norm
    started = False
    for node in graph.nodes:
        inputs = [n for n in node.all_input_nodes if n in derived]
        if any(n in reads for n in node.all_input_nodes):
            reads.add(node)
        if not inputs or node.op != "call_function":
            continue
        derived.add(node)
        target = target_of(node)
        on_stream = [n for n in inputs if n in current]
        before = not started and (
            (target in _SCALED and _is_scalar(graph, node)) or (target == _ADD and len(inputs) == 1)
        )  # a scaled table, learned positions
        if (target.startswith(SAME) or before) and node.all_input_nodes[0] in current:
            stream.add(node)
            current.add(node)
        elif target == _ADD and len(inputs) == 2 and len(on_stream) == 1:
            started = True
            (added,) = (n for n in inputs if n not in current)
            yield from _parallel([_branch(graph, term, reads, stream) for term in _terms(added, derived, stream)])
            current = {node}
            stream.add(node)


def _is_scalar(graph: Graph, node: Node) -> bool:
    """Whether a product multiplies the stream by one number."""
    others = node.all_input_nodes[1:]
    return all(not graph.value(other).axes for other in others)


def _terms(added: Node, derived: set[Node], stream: set[Node]) -> Iterator[Node]:
    """Parallel branches are summed before they are added to the stream: each of them."""
    parts = [n for n in added.all_input_nodes if n in derived and n not in stream]
    if target_of(added) == _ADD and len(parts) == 2:
        for part in parts:
            yield from _terms(part, derived, stream)
    else:
        yield added


def _parallel(branches: list[Branch]) -> Iterator[Branch]:
    """Parallel branches without what they share, such as the norm that both read."""
    for branch in branches:
        others = frozenset[Any]().union(*(other.nodes for other in branches if other is not branch))
        yield Branch(branch.kind, branch.nodes - others, branch.tensors)


def _branch(graph: Graph, term: Node, reads: set[Node], stream: set[Node]) -> Branch:
    """Everything between the stream and what is added to it."""
    nodes: set[Node] = set()
    tensors: set[str] = set()
    todo = [term]
    while todo:
        node = todo.pop()
        if node in graph.stored:
            tensors.add(graph.stored[node])
        elif node in reads and node not in stream and node not in nodes:
            nodes.add(node)
            todo += node.all_input_nodes
    attends = any("scaled_dot_product_attention" in target_of(node) for node in nodes)
    return Branch("attn" if attends else "mlp", frozenset(nodes), frozenset(tensors))


# Ownership -----------------------------------------------------------------------------------------------------------


def _owned(graph: Graph, branch: Branch) -> set[str]:
    """The tensors that nothing outside the branch reads."""
    outside = {
        graph.stored[n]
        for node in graph.nodes
        if node not in branch.nodes
        for n in node.all_input_nodes
        if n in graph.stored
    }
    return set(branch.tensors) - outside


def _shared(graph: Graph, alike: list[Branch]) -> str:
    """Why a branch cannot be dropped alone, or ""."""
    if len(alike) > 1:
        return f"the layer has {len(alike)} branches of this kind, which the configuration cannot tell apart"
    inner, users = alike[0].nodes, 0
    for node in graph.nodes:
        if node not in inner:
            users += sum(n in inner for n in node.all_input_nodes)
    return "" if users == 1 else "other parts of the model read values from inside it"


def _outside(of_layer: list[str], branches: list[Branch]) -> str:
    """Why a layer cannot be dropped whole, or ""."""
    inside = {name for branch in branches for name in branch.tensors}
    rest = [name for name in of_layer if name not in inside]
    return f"`{rest[0]}` acts on the stream itself" if rest else ""
