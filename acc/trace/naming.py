"""Names and roles of dims, from where they stand in the graph.

`vocab` and `hidden` are the rows and columns of the table that the input tokens index; `kv_group.i`, `q_per_kv.i` and
`head_dim` are read off the attention op of layer i; `ffn.i` is what one matrix of layer i makes and another consumes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from acc.ir import Dim, Role
from acc.trace.axes import Var, solved, variables
from acc.trace.graph import Graph, path_of, target_of, token_tables

Place = tuple[Role, int | None]
"""A role and the layer, None for a global dim."""

_NO_KEY = "the configuration has no key for it"


def name(graph: Graph) -> tuple[dict[Var, str], dict[str, Dim]]:
    """Give every Var of every stored tensor a name, and every name a Dim, in the order of first use."""
    places = _places(graph)
    groups: dict[tuple[Place, int | None], list[Var]] = defaultdict(list)
    for var, (role, layer) in places.items():
        groups[(role, layer), var.size if role == "head_dim" else None].append(var)
    names: dict[Var, str] = {}
    dims: dict[str, Dim] = {}
    for (place, _), members in groups.items():
        one = len(members) == 1 or place[0] == "head_dim"
        for number, var in enumerate(members):
            label = _label(place, dims if one and number == 0 else {}, None if one else number)
            if one and number:
                label = names[members[0]]
            names[var] = label
            dims.setdefault(label, _dim(graph, label, place, var, one and place[0] != "other"))
    for layer, roles in _attention_layers(graph, places).items():
        dims |= {
            d.name: d for role in ("kv_group", "q_per_kv") if role not in roles for d in [_one(graph, role, layer)]
        }
    return names, dims


def _label(place: Place, taken: Mapping[str, Dim], number: int | None) -> str:
    role, layer = place
    ending = "" if layer is None else f".{layer}"
    label = f"{role}{ending}" if number is None else f"{role}_{number}{ending}"
    return label if label not in taken else f"{role}_{len(taken)}{ending}"


def _one(graph: Graph, role: Role, layer: int) -> Dim:
    """The dim of size 1 that no axis shows: one key head, or one query per key head."""
    return Dim(f"{role}.{layer}", role, 1, f"{graph.layers}.{layer}", "const")


def _dim(graph: Graph, label: str, place: Place, var: Var, known: bool) -> Dim:
    role, layer = place
    why = var.pinned or ("" if known else _NO_KEY)
    scope = "" if layer is None else f"{graph.layers}.{layer}"
    return Dim(label, role, var.size, scope, "pinned" if why else "free", why)


# Places --------------------------------------------------------------------------------------------------------------


def _places(graph: Graph) -> dict[Var, Place]:
    """The role and layer of every Var of every stored tensor, in the order of first use."""
    special = dict(_global_places(graph)) | dict(_attention_places(graph))
    inner = _inner(graph)
    found: dict[Var, Place] = {}
    layers: dict[Var, set[int | None]] = defaultdict(set)
    for tensor, value in graph.tensors.items():
        for axis in value.axes:
            for var in variables(axis):
                layers[var].add(graph.layer_of(tensor))
                found.setdefault(var, ("other", None))
    for var in found:
        (layer,) = layers[var] if len(layers[var]) == 1 else (None,)
        found[var] = special.get(var) or (("ffn", layer) if (layer, var) in inner else ("other", layer))
    return found | dict(_head_parts(graph, found))


def _head_parts(graph: Graph, places: Mapping[Var, Place]) -> Iterator[tuple[Var, Place]]:
    """What stands behind heads in a product is the size of a head, also where the model treats its parts apart."""
    for value in graph.tensors.values():
        for segment in (segment for axis in value.axes for segment in solved(axis)):
            behind = False
            for var in segment:
                if behind and places[var][0] == "other" and var.pinned:
                    yield var, ("head_dim", None)
                behind = behind or places[var][0] in ("kv_group", "q_per_kv")


def _global_places(graph: Graph) -> Iterator[tuple[Var, Place]]:
    for node in token_tables(graph):
        rows, columns = graph.value(node.args[0]).axes
        yield from ((var, ("vocab", None)) for var in variables(rows))
        yield from ((var, ("hidden", None)) for var in variables(columns))


def _attention_places(graph: Graph) -> Iterator[tuple[Var, Place]]:
    for node in graph.nodes:
        if target_of(node) == "aten.scaled_dot_product_attention.default":
            q, v = graph.value(node.args[0]).axes, graph.value(node.args[2]).axes
            layer = graph.layer_of(path_of(node))
            yield from ((var, ("q_per_kv" if var.repeat else "kv_group", layer)) for var in variables(q[-3]))
            yield from ((var, ("head_dim", None)) for axis in (q[-1], v[-1]) for var in variables(axis))


def _attention_layers(graph: Graph, places: Mapping[Var, Place]) -> dict[int, set[Role]]:
    """The layers with an attention op, each with the roles of its dims."""
    found: dict[int, set[Role]] = {}
    for node in graph.nodes:
        layer = graph.layer_of(path_of(node))
        if target_of(node) == "aten.scaled_dot_product_attention.default" and layer is not None:
            found[layer] = {role for role, its in places.values() if its == layer}
    return found


def _inner(graph: Graph) -> set[tuple[int | None, Var]]:
    """The Vars that one matrix of a layer makes and another matrix of the layer consumes."""
    made: set[tuple[int | None, Var]] = set()
    consumed: set[tuple[int | None, Var]] = set()
    for node in graph.nodes:
        if target_of(node) in ("aten.linear.default", "aten.addmm.default"):
            weight = node.args[1] if target_of(node) == "aten.linear.default" else node.args[2]
            rows, columns = graph.value(weight).axes
            if target_of(node) == "aten.addmm.default":
                rows, columns = columns, rows
            layer = graph.layer_of(path_of(node))
            made |= {(layer, var) for var in variables(rows)}
            consumed |= {(layer, var) for var in variables(columns)}
    return made & consumed
