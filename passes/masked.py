"""The parent in memory with an Arch applied by zeros: shapes stay, so any family runs unchanged, and changes undo.

Cutting an index of an ffn or kv_group dim equals zeroing its columns in the matrix that consumes it; dropping a
sub-block equals zeroing that matrix. Cutting the hidden dim equals zeroing its coordinates wherever the residual stream
is written, with the gains of the norms scaled for the mean square that is taken over all coordinates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from acc.ir import ModelIR, Tensor, dims_of
from acc.passes.moments import Moments
from acc.passes.norms import gain_factors, gain_offset, scaled_gain
from acc.passes.structure import consumers, layer_of, module_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Masked:
    """A model whose tensors can be replaced by name, and put back.

    Attributes:
        ir: of the whole model; `consuming` its matrices that consume an ffn or kv_group dim, by name.
    """

    def __init__(self, ir: ModelIR, model: PreTrainedModel) -> None:
        self.ir = ir
        self.model = model
        roles = [*ir.select("ffn"), *ir.select("kv_group")]
        self.consuming = {one.tensor.name: one.tensor for dim in roles for one in consumers(ir, dim.name)}
        self.original: dict[str, torch.Tensor] = {
            name: parameter.data for name, parameter in model.named_parameters() if name in ir.tensors
        }

    def put(self, values: Mapping[str, torch.Tensor]) -> None:
        """Replace tensors; a tied one changes in all its places."""
        for name, value in values.items():
            self.model.get_parameter(name).data = value

    def restore(self, names: Iterable[str] | None = None) -> None:
        """Put the parent's tensors back; all of them if no names are given."""
        self.put({name: self.original[name] for name in (self.original if names is None else names)})

    def of_layer(self, index: int) -> list[str]:
        """The names of the tensors of one layer."""
        return [name for name in self.original if layer_of(self.ir, self.ir.tensors[name]) == index]

    def module(self, name: str) -> nn.Module:
        """The module that a tensor belongs to."""
        found: nn.Module = self.model.get_submodule(module_of(name))
        return found

    def linear(self, index: int) -> dict[str, nn.Module]:
        """The linear modules of a layer by the names of their matrices."""
        found = {name: self.module(name) for name in self.of_layer(index) if len(self.ir.tensors[name].axes) == 2}
        return {name: module for name, module in found.items() if isinstance(module, nn.Linear)}

    def consumers_of(self, index: int) -> list[Tensor]:
        """The consuming matrices of one layer, attention and MLP."""
        return [tensor for tensor in self.consuming.values() if layer_of(self.ir, tensor) == index]

    def cut(self, arch: ModelIR, moments: Moments) -> dict[str, torch.Tensor]:
        """What `put` needs for the Arch of `arch`: every tensor that differs from the parent's, without any refit.

        Args:
            arch: the model with sizes and kept indices chosen.
        """
        hidden = self.ir.select("hidden")[0].name
        values: dict[str, torch.Tensor] = {}
        if arch.size(hidden) < self.ir.dims[hidden].size:
            values |= self._cut_hidden(arch, hidden, moments)
        for tensor in self.consuming.values():
            kept = arch.axis_indices(tensor.axes[1]) if arch.present(tensor) else []
            value = values.get(tensor.name, self.original[tensor.name])
            if len(kept) < value.shape[1]:
                values[tensor.name] = keep_columns(value, kept)
        for tensor in self._biases(arch):
            values[tensor.name] = torch.zeros_like(self.original[tensor.name])
        return values

    def _biases(self, arch: ModelIR) -> list[Tensor]:
        """Biases of consuming matrices that the Arch drops."""
        names = {name.rpartition(".")[0] for name in self.consuming}
        return [
            tensor
            for name, tensor in self.ir.tensors.items()
            if len(tensor.axes) == 1 and name.rpartition(".")[0] in names and not arch.present(tensor)
        ]

    def _cut_hidden(self, arch: ModelIR, hidden: str, moments: Moments) -> dict[str, torch.Tensor]:
        """Zero the cut coordinates wherever the stream is written, and scale the gains."""
        size, kept = self.ir.dims[hidden].size, list(arch.kept(hidden))
        gone = torch.ones(size, dtype=torch.bool)
        gone[kept] = False
        factors = gain_factors(arch, moments)
        spread = (len(kept) / size) ** 0.5  # the norm divides by the root of a mean over all coordinates
        values = {}
        for name, original in self.original.items():
            tensor = self.ir.tensors[name]
            if name in factors:
                values[name] = scaled_gain(original, factors[name] * spread, gain_offset(self.ir, tensor))
            elif hidden in dims_of(tensor.axes):
                dimension = next(at for at, axis in enumerate(tensor.axes) if hidden in dims_of([axis]))
                values[name] = original.index_fill(dimension, gone.nonzero()[:, 0], 0.0)
        return values


def keep_columns(value: torch.Tensor, kept: Sequence[int]) -> torch.Tensor:
    """A matrix [out, in] with all but some columns zero."""
    cut = torch.zeros_like(value)
    cut[:, list(kept)] = value[:, list(kept)]
    return cut
