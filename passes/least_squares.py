"""Least squares on second moments: which columns of a matrix matter, and what the others become when some are gone.

Notation: W [out, in] is a matrix, H [in, in] the second moments of its inputs (mean of x xᵀ), K the kept columns.
Removing columns S costs tr(W_S ([H⁻¹]_SS)⁻¹ W_Sᵀ) once the others are refitted (optimal brain surgeon; ZipLM,
arXiv 2302.04089, section 3.1); the refitted matrix is W H[:, K] (H[K, K])⁻¹, and removing in sequence gives the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

DAMPING = 0.01
"""Ridge as a fraction of the mean diagonal of the second moments."""


def damped(moments: torch.Tensor, fraction: float = DAMPING) -> torch.Tensor:
    """H + fraction · mean(diag H) · I."""
    ridge = fraction * moments.diagonal().mean().clamp_min(torch.finfo(moments.dtype).tiny)
    return moments + ridge * torch.eye(len(moments), dtype=moments.dtype, device=moments.device)


def shrunk(moments: torch.Tensor, share: float) -> torch.Tensor:
    """The second moments with everything off the diagonal shrunk by a share."""
    return (1 - share) * moments + share * torch.diag(moments.diagonal())


def inverse(matrix: torch.Tensor) -> torch.Tensor:
    """The inverse of a symmetric positive definite matrix."""
    return torch.cholesky_inverse(torch.linalg.cholesky(matrix))


def refit(weight: torch.Tensor, moments: torch.Tensor, keep: Sequence[int], fraction: float = DAMPING) -> torch.Tensor:
    """The kept columns [out, kept] that replace all columns best: W H[:, K] (H[K, K] + ridge)⁻¹, ridge towards W[:, K].

    The ridge pulls towards the plain cut, not towards zero: where few tokens say little, little changes.
    """
    kept = torch.as_tensor(keep, dtype=torch.long)
    inner, cut = moments[kept][:, kept], weight[:, kept]
    return solve(cut, inner, weight @ moments[:, kept], fraction)


def solve(prior: torch.Tensor, inner: torch.Tensor, cross: torch.Tensor, fraction: float) -> torch.Tensor:
    """The V [out, in] that minimises E‖V x − y‖² + ridge ‖V − prior‖², given `inner` E x xᵀ and `cross` E y xᵀ."""
    factor = torch.linalg.cholesky(damped(inner, fraction))
    gap = cross - prior @ inner
    return prior + torch.cholesky_solve(gap.T, factor).T


def obs_order(
    weight: torch.Tensor, moments: torch.Tensor, blocks: Sequence[Sequence[int]], step: int = 16
) -> list[int]:
    """Blocks of columns in the order of importance, most important first: the cheapest are removed `step` at a time.

    Args:
        weight: [out, in].
        moments: [in, in].
        blocks: the columns of each block; all of one size.
        step: blocks removed between updates of the inverse.
    """
    removed: list[int] = []
    width = len(blocks[0])
    left = torch.arange(len(blocks))
    columns = torch.tensor([column for block in blocks for column in block])
    inner = inverse(damped(moments[columns][:, columns]))
    weight = weight[:, columns]
    while len(left):
        count = min(step, len(left))
        gone = torch.topk(_costs(weight, inner, width), count, largest=False).indices  # the cheapest first
        removed += left[gone].tolist()
        stay = torch.ones(len(left), dtype=torch.bool)
        stay[gone] = False
        wide = stay.repeat_interleave(width)
        if not wide.any():
            break
        weight, inner = _eliminate(weight, inner, wide)
        left = left[stay]
    return removed[::-1]


def _costs(weight: torch.Tensor, inner: torch.Tensor, width: int) -> torch.Tensor:
    """tr(W_S ([H⁻¹]_SS)⁻¹ W_Sᵀ) of each block S of `width` columns."""
    if width == 1:
        return weight.square().sum(0) / inner.diagonal()
    count = inner.shape[0] // width
    square = inner.reshape(count, width, count, width)
    own = square[torch.arange(count), :, torch.arange(count), :]
    parts = weight.reshape(weight.shape[0], count, width).permute(1, 2, 0)  # [blocks, width, out]
    costs: torch.Tensor = (parts * torch.linalg.solve(own, parts)).sum((1, 2))
    return costs


def _eliminate(weight: torch.Tensor, inner: torch.Tensor, stay: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Refit the columns that stay for the loss of the others, and the inverse of what is left of H."""
    ratio = torch.linalg.solve(inner[~stay][:, ~stay], inner[~stay][:, stay])  # [gone, stay]
    return weight[:, stay] - weight[:, ~stay] @ ratio, inner[stay][:, stay] - inner[stay][:, ~stay] @ ratio


def contribution(weight: torch.Tensor, moments: torch.Tensor, blocks: Sequence[Sequence[int]]) -> torch.Tensor:
    """Energy that each block of columns adds to the output on its own: tr(W_S H_SS W_Sᵀ)."""
    found = []
    for block in blocks:
        columns = torch.as_tensor(block)
        part = weight[:, columns]
        found.append(((part @ moments[columns][:, columns]) * part).sum())
    return torch.stack(found)


def output_error(weight: torch.Tensor, keep: Sequence[int], kept: torch.Tensor, moments: torch.Tensor) -> float:
    """E‖W x − V x_K‖² for a cut matrix V [out, kept] of the columns K, on second moments H."""
    gap = weight.clone()
    gap[:, torch.as_tensor(keep)] -= kept
    return float(((gap @ moments) * gap).sum())
