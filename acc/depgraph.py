"""The IR as a networkx graph: which axes of which tensors a dim cuts, and what else must change with it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import networkx as nx

from acc.diag import AccError, nearest
from acc.ir import ModelIR, dims_of


class AxisOf(NamedTuple):
    """One axis of one tensor."""

    tensor: str
    place: int


def graph(ir: ModelIR) -> nx.Graph:
    """A bipartite graph of dims (by name, `kind="dim"`) and axes (`AxisOf`, `kind="axis"`).

    An edge says that the axis is made of the dim (`kind="size"`), or that its tensor exists under it
    (`kind="presence"`).
    """
    made = nx.Graph()
    for dim in ir.dims.values():
        made.add_node(dim.name, kind="dim", role=dim.role, size=dim.size, state=dim.state)
    for tensor in ir.tensors.values():
        for place, axis in enumerate(tensor.axes):
            node = AxisOf(tensor.name, place)
            made.add_node(node, kind="axis")
            made.add_edges_from((name, node, {"kind": "presence"}) for name in tensor.presence)
            made.add_edges_from((name, node, {"kind": "size"}) for segment in axis for name in segment)
    return made


def axes_of(ir: ModelIR, dim: str) -> list[AxisOf]:
    """The axes that a cut of the dim changes; for a presence dim, every axis that goes with it."""
    if dim not in ir.dims:
        raise AccError.of("ACC211", "arch", f"there is no dim `{dim}`", nearest(dim, ir.dims))
    return sorted(graph(ir).neighbors(dim))


def coupled(ir: ModelIR, dim: str) -> list[str]:
    """The other dims that share an axis with this one, so that its indices are laid out among theirs."""
    near = (dims_of([ir.tensors[axis.tensor].axes[axis.place]]) for axis in axes_of(ir, dim))
    return sorted(set().union(*near) - {dim})


def dot(ir: ModelIR, dims: Iterable[str] = ()) -> str:
    """Graphviz source of the graph, or of the part around some dims: dims as boxes, tensors as ellipses."""
    wanted = list(dims) or list(ir.dims)
    lines = ["graph acc {", "  rankdir=LR;", "  node [fontname=Helvetica];"]
    for name in wanted:
        dim = ir.dims[name]
        label = f"{name}\\n{ir.size(name)} of {dim.size}, {dim.state}"
        lines.append(f'  "{name}" [shape=box, label="{label}"];')
        lines += [f'  "{name}" -- "{axis.tensor}" [label="{axis.place}"];' for axis in axes_of(ir, name)]
    return "\n".join([*lines, "}"]) + "\n"
