"""Numbers in the code that depend on the hidden size, and what keeps a cut model exact in spite of them.

Gemma multiplies its token embeddings by the root of the hidden size. A cut model would multiply by another number, so
its table is scaled by the inverse, and so is, if the table is also the output layer, the gain of the last norm.
Such numbers are found by comparing the graph with that of a model twice as wide; one that cannot be made up for pins
the hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from acc.diag import AccError
from acc.ir import Dim, Rescale
from acc.trace.graph import SAME, Graph, export, path_of, solve, target_of, token_tables

if TYPE_CHECKING:
    from torch.fx import Node

_ARITHMETIC = ("aten.mul.", "aten.div.", "aten.add.", "aten.sub.", "aten.pow.")


@dataclass(frozen=True)
class Scaled:
    """An op with a number that depends on the hidden size.

    Attributes:
        node: in the small graph.
        ratio: the number in a model twice as wide over the number here.
    """

    node: Node
    ratio: float


def find(
    graph: Graph, small: Graph, config: Mapping[str, Any], dims: dict[str, Dim]
) -> tuple[dict[str, Rescale], dict[str, Dim]]:
    """The tensors whose values a cut must rescale, and the dims, `hidden` pinned where that cannot be done.

    Args:
        graph: of the whole model.
        small: of the same model with fewer layers, which is compared.
        config: of the small model.
        dims: of the whole model.
    """
    hidden = dims.get("hidden")
    if hidden is None or hidden.state != "free":
        return {}, dims
    if "hidden_size" not in config:
        return {}, _pinned(dims, "the configuration has no key `hidden_size`")
    try:
        scaled = _compare(small, config)
    except AccError:
        return {}, _pinned(dims, "a model of another hidden size does not export")
    scales: dict[str, Rescale] = {}
    for one in scaled:
        made_up = _make_up(graph, small, one)
        if made_up is None:
            where = f"{target_of(one.node)} in {path_of(one.node) or 'the model'}"
            return {}, _pinned(dims, f"{where}: its number depends on the hidden size")
        scales |= made_up
    return scales, dims


def _pinned(dims: dict[str, Dim], why: str) -> dict[str, Dim]:
    return {**dims, "hidden": replace(dims["hidden"], state="pinned", why=why)}


# Comparing -----------------------------------------------------------------------------------------------------------


def _compare(graph: Graph, narrow: Mapping[str, Any]) -> list[Scaled]:
    """The ops with numbers that change when the hidden size doubles."""
    wide = {**narrow, "hidden_size": 2 * narrow["hidden_size"]}
    twin = solve(*export(wide))
    buffers, twin_buffers = _scalars(narrow), _scalars(wide)
    if [target_of(node) for node in graph.nodes] != [target_of(node) for node in twin.nodes]:
        raise AccError.of("ACC201", str(narrow["model_type"]), "another hidden size gives another graph")
    found = []
    for node, other in zip(graph.nodes, twin.nodes, strict=True):
        pairs = zip(_numbers(graph, node, buffers), _numbers(twin, other, twin_buffers), strict=True)
        found += [Scaled(node, b / a if a else math.inf) for a, b in pairs if not math.isclose(a, b, rel_tol=1e-6)]
    return found


def _scalars(config: Mapping[str, Any]) -> dict[str, float]:
    """The values of the buffers that hold one number."""
    from acc.model import skeleton

    return {name: float(buffer) for name, buffer in skeleton(config).named_buffers() if buffer.numel() == 1}


def _numbers(graph: Graph, node: Node, buffers: Mapping[str, float]) -> Iterator[float]:
    """The numbers that an op computes with: floats, integers of arithmetic, buffers of one number."""
    if node.op != "call_function":
        return
    arithmetic = target_of(node).startswith(_ARITHMETIC)
    for argument in (*node.args, *node.kwargs.values()):
        if isinstance(argument, float) or (arithmetic and isinstance(argument, int)):
            yield float(argument)
    for read in node.all_input_nodes if arithmetic else ():
        source = _source(read)
        if source in graph.buffers and graph.buffers[source] in buffers:
            yield buffers[graph.buffers[source]]


def _source(node: Node) -> Node:
    """Where a value comes from, past casts and copies."""
    while target_of(node).startswith(SAME):
        node = node.all_input_nodes[0]
    return node


# Making up for it ----------------------------------------------------------------------------------------------------


def _make_up(graph: Graph, small: Graph, scaled: Scaled) -> dict[str, Rescale] | None:
    """What must be rescaled so that the number's change does nothing; None if nothing known would do."""
    tables = {table: small.stored[table.args[0]] for table in token_tables(small)}  # type: ignore[index]
    source = _source(scaled.node.all_input_nodes[0])
    if not target_of(scaled.node).startswith(("aten.mul.", "aten.div.")) or source not in tables:
        return None
    power = math.log2(scaled.ratio) * (-1 if "div" in target_of(scaled.node) else 1)
    power = round(4 * power) / 4 if math.isclose(power, round(4 * power) / 4, abs_tol=1e-5) else power  # float32 buffer
    table = tables[source]
    found = {table: Rescale("hidden", power)}
    for node in graph.nodes:
        reads_table = any(graph.stored.get(n) == table for n in node.all_input_nodes)
        if reads_table and target_of(node) != "aten.embedding.default":
            gain = _gain(graph, node.all_input_nodes[0])
            if target_of(node) != "aten.linear.default" or gain is None:
                return None
            found[gain[0]] = Rescale("hidden", -power, gain[1])
    return found


def _gain(graph: Graph, node: Node) -> tuple[str, float] | None:
    """The stored gain that a value was last multiplied by, and the number added to the gain first."""
    product = _source(node)
    if not target_of(product).startswith("aten.mul."):
        return None
    for factor in map(_source, product.all_input_nodes):
        if factor in graph.stored:
            return graph.stored[factor], 0.0
        if target_of(factor).startswith("aten.add.") and len(factor.all_input_nodes) == 1:
            inner = _source(factor.all_input_nodes[0])
            number = next(a for a in factor.args if isinstance(a, int | float))
            if inner in graph.stored:
                return graph.stored[inner], float(number)
    return None
