"""The weights of every choice of a block, made when asked for: cut by the orders, refitted on the parent's moments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from acc.ir import Arch, ModelIR, Tensor
from acc.passes import least_squares as ls
from acc.passes.masked import Masked
from acc.passes.moments import Moments
from acc.passes.transform.slice import with_kept

RIDGE = 0.05
"""Of the one-shot refits, as a fraction of the mean diagonal."""
MOST_BYTES = 2 << 30
"""Of the weights that are kept; beyond it the oldest are made again when asked for."""


class Library:
    """Consuming matrices by kept size, in the parent's shapes with zeros where cut.

    Args:
        base: tensors that take the parent's place, such as those of a cut stream.
    """

    def __init__(
        self,
        masked: Masked,
        moments: Moments,
        orders: Mapping[str, Sequence[int]],
        base: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.masked, self.moments, self.orders = masked, moments, orders
        self.base = dict(base or {})
        self._made: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def values(self, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """The tensors that some sizes change, on top of `base`."""
        arch = self.arch(sizes)
        return {
            tensor.name: self._matrix(tensor, self._kept(arch, tensor))
            for tensor in self.masked.consuming.values()
            if len(self._kept(arch, tensor)) < self._weight(tensor).shape[1]
        }

    def error(self, sizes: Mapping[str, int], tensor: Tensor) -> float:
        """The share of a consuming matrix's output energy that is lost at some sizes, after the refit."""
        moments, weight = self.moments[f"full/{tensor.name}"], self._weight(tensor).float()
        value = self._matrix(tensor, self._kept(self.arch(sizes), tensor)).float()
        gap = weight - value
        return float(((gap @ moments) * gap).sum() / ((weight @ moments) * weight).sum())

    def arch(self, sizes: Mapping[str, int]) -> ModelIR:
        """The whole model with some sizes, kept indices chosen."""
        return with_kept(self.masked.ir.with_arch(Arch(dict(sizes))), self.orders)

    def _weight(self, tensor: Tensor) -> torch.Tensor:
        return self.base.get(tensor.name, self.masked.original[tensor.name])

    def _kept(self, arch: ModelIR, tensor: Tensor) -> tuple[int, ...]:
        return tuple(arch.axis_indices(tensor.axes[1])) if arch.present(tensor) else ()

    def _matrix(self, tensor: Tensor, kept: tuple[int, ...]) -> torch.Tensor:
        key = (tensor.name, kept)
        if key not in self._made:
            weight = self._weight(tensor)
            value = torch.zeros_like(weight)
            if kept:
                moments = self.moments[f"full/{tensor.name}"]
                value[:, list(kept)] = ls.refit(weight.float(), moments, kept, RIDGE).to(weight.dtype)
            self._made[key] = value
            while sum(made.nbytes for made in self._made.values()) > MOST_BYTES and len(self._made) > 1:
                self._made.pop(next(iter(self._made)))
        return self._made[key]
