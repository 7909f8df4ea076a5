"""Cutting stored tensors to the Arch: mechanical, since every axis says which dims it is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from acc.diag import AccError
from acc.ir import Arch, ModelIR, Tensor, present_tensors

if TYPE_CHECKING:
    import torch


def cut(ir: ModelIR, tensor: Tensor, value: torch.Tensor) -> torch.Tensor:
    """The parent's value of a tensor cut to the Arch, in the same dtype.

    Args:
        tensor: of `ir`.
        value: of the traced shape.

    Raises:
        AccError: the value has another shape than the traced one.
    """
    import torch

    traced = traced_shape(ir, tensor)
    if tuple(value.shape) != traced:
        raise AccError.of(
            "ACC233", tensor.name, f"has shape {list(value.shape)}, the configuration says {list(traced)}"
        )
    for dimension, axis in enumerate(tensor.axes):
        if ir.axis_size(axis) != value.shape[dimension]:
            value = value.index_select(dimension, torch.tensor(ir.axis_indices(axis), device=value.device))
    return _rescaled(ir, tensor, value)


def traced_shape(ir: ModelIR, tensor: Tensor) -> tuple[int, ...]:
    """The shape of a tensor in the traced model."""
    return ir.with_arch(Arch()).shape(tensor)


def _rescaled(ir: ModelIR, tensor: Tensor, value: torch.Tensor) -> torch.Tensor:
    scale = tensor.rescale
    if scale is None or ir.size(scale.dim) == ir.dims[scale.dim].size:
        return value
    factor = (ir.dims[scale.dim].size / ir.size(scale.dim)) ** scale.power
    scaled: torch.Tensor = (value.double() + scale.offset) * factor - scale.offset
    return scaled.to(value.dtype)


def written_name(ir: ModelIR, tensor: Tensor) -> str:
    """The name of a present tensor in a written checkpoint, where the layers that are left are numbered from 0."""
    if not tensor.presence:
        return tensor.name
    from acc.model import kept_layers

    layer = ir.dims[tensor.presence[0]]
    assert layer.layer is not None
    number = kept_layers(ir).index(layer.layer)
    return layer.scope.removesuffix(str(layer.layer)) + str(number) + tensor.name.removeprefix(layer.scope)


def cut_tensors(ir: ModelIR, read: Callable[[str], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that the Arch still has, cut, under its written name; one at a time, tied storage once.

    Args:
        read: gives the parent's value of a tensor by its name.
    """
    for tensor in present_tensors(ir):
        yield written_name(ir, tensor), cut(ir, tensor, read(tensor.name))
