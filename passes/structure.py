"""Where dims act in a model, read from the IR's axes: who consumes a dim, who reads the stream, what is a gain.

Nothing here looks at a name's spelling, except that a tensor `a.b.weight` belongs to the module `a.b`.
"""

from __future__ import annotations

from dataclasses import dataclass

from acc.ir import Arch, ModelIR, Tensor, dims_of


@dataclass(frozen=True)
class Consumer:
    """A matrix whose input axis is made of a dim: `down_proj` for `ffn.3`, `o_proj` for `kv_group.3`.

    Attributes:
        tensor: axes [out, in].
        columns: flat input columns of each index of the dim, [dim size][columns per index].
    """

    tensor: Tensor
    columns: tuple[tuple[int, ...], ...]


def module_of(tensor: Tensor | str) -> str:
    """The path of the module that holds a tensor."""
    return (tensor if isinstance(tensor, str) else tensor.name).rpartition(".")[0]


def consumers(ir: ModelIR, dim: str) -> list[Consumer]:
    """The matrices whose input axis contains the dim."""
    return [
        Consumer(tensor, columns_of(ir, tensor, dim))
        for tensor in ir.tensors.values()
        if len(tensor.axes) == 2 and dim in dims_of(tensor.axes[1:])
    ]


def columns_of(ir: ModelIR, tensor: Tensor, dim: str) -> tuple[tuple[int, ...], ...]:
    """The flat columns of the traced tensor that belong to each index of a dim of its input axis."""
    whole = ir.with_arch(Arch())
    axis = tensor.axes[1]
    found = []
    for index in range(ir.dims[dim].size):
        arch = Arch({dim: 1}, {dim: (index,)})
        found.append(tuple(whole.with_arch(arch).axis_indices(axis)))
    return tuple(found)


def gains(ir: ModelIR) -> list[Tensor]:
    """The gains of the norms over the hidden dim: vectors of a module that has no matrix (a bias has one beside it)."""
    hidden = ir.select("hidden")[0].name
    with_matrix = {module_of(tensor) for tensor in ir.tensors.values() if len(tensor.axes) > 1}
    return [
        tensor
        for tensor in ir.tensors.values()
        if tensor.axes == (((hidden,),),) and module_of(tensor) not in with_matrix
    ]


def layer_of(ir: ModelIR, tensor: Tensor) -> int | None:
    """The number of the layer that a tensor lives in; None outside the layers."""
    for name in tensor.presence:
        if ir.dims[name].role == "layer":
            return ir.dims[name].layer
    return None


def layer_prefix(ir: ModelIR, index: int) -> str:
    """The module path of a decoder layer in the traced model, such as `model.layers.3`."""
    return ir.dims[f"layer.{index}"].scope
