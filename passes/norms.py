"""Norms over a cut hidden dim: their mean square is taken over fewer coordinates, so their gains are rescaled."""

from __future__ import annotations

import copy
import json
from functools import lru_cache

import torch
from torch import nn

from acc.ir import ModelIR, Tensor
from acc.passes.moments import Moments
from acc.passes.structure import gains, module_of


def gain_factors(ir: ModelIR, moments: Moments) -> dict[str, float]:
    """By what each gain is multiplied when the hidden dim is cut as the Arch says: rms over the kept / rms over all.

    Root mean squares over the calibration tokens, each token normalised (Minitron, arXiv 2407.14679, section 2.2).
    """
    hidden = ir.select("hidden")[0]
    if ir.size(hidden.name) == hidden.size:
        return {}
    kept = torch.tensor(ir.kept(hidden.name))
    found = {}
    for tensor in gains(ir):
        energy = moments.values.get(f"norm/{tensor.name}")
        if energy is not None:
            found[tensor.name] = float((energy[kept].mean() / energy.mean()).sqrt())
    return found


def scaled_gain(value: torch.Tensor, factor: float, offset: float) -> torch.Tensor:
    """A gain that multiplies by (offset + value), made to multiply by `factor` times that."""
    return ((value.double() + offset) * factor - offset).to(value.dtype)


def gain_offset(ir: ModelIR, tensor: Tensor) -> float:
    """What the norm adds to its stored gain before it multiplies: 0, or 1 in Gemma; found by running it."""
    return _offset(json.dumps(dict(ir.config), sort_keys=True), module_of(tensor))


@lru_cache(maxsize=4096)
def _offset(config: str, path: str) -> float:
    return probe_offset(_skeleton(config).get_submodule(path))


@lru_cache(maxsize=2)
def _skeleton(config: str) -> nn.Module:
    """The model without weights."""
    from acc import model

    with torch.device("meta"):
        built: nn.Module = model.build(json.loads(config))
    return built


@torch.no_grad()
def probe_offset(norm: nn.Module) -> float:
    """The c of a norm that computes n(x) (c + weight), from its outputs for weight 0 and weight 1."""
    probe = copy.deepcopy(norm).to_empty(device="cpu").float()
    size = next(probe.parameters()).shape[0]
    x = torch.linspace(-1, 2, size, device="cpu").unsqueeze(0)
    outputs = []
    for gain in (0.0, 1.0):
        for parameter in probe.parameters():
            parameter.fill_(gain)
        outputs.append(probe(x).double())
    return round(float((outputs[0] / (outputs[1] - outputs[0])).median()), 3)
