"""The 8-bit activations of llama.cpp's CPU kernels, imitated in PyTorch.

Before a quantised matrix is multiplied, ggml rounds its *input* to 8 bits: blocks of 32 with an F16 scale (Q8_0) for
the 32-column types, blocks of 256 with one scale (Q8_K) for K-quants (`vec_dot_type` in ggml-cpu.c, and
`quantize_row_q8_0_ref`, `quantize_row_q8_K_ref` in ggml-quants.c). So the engine cannot equal PyTorch with the same
weights: on SmolLM2-135M this rounding alone moves the logits by a mean KL of 4e-3 (Q8_0) and 8e-3 (Q4_K_M). What the
imitation gives is not the same noise (roundings flip at the first difference in the last bit, and fall apart over the
layers) but noise of the same size: the yardstick for `verify`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acc.backends.llamacpp.dequantize import read_file
from acc.ir import ModelIR

if TYPE_CHECKING:
    import torch

    Round = Callable[[torch.Tensor], torch.Tensor]


def imitate(model: Any, artifact: Path, ir: ModelIR) -> None:
    """Hook a PyTorch model so that every linear rounds its input as the engine does for the type its matrix has.

    Args:
        model: of the folder that `dequantized` wrote from `artifact`.
    """
    from torch import nn

    types = dict(_types(artifact, ir))
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            _hook(module, _rounding(types[f"{name}.weight"]))


def _types(artifact: Path, ir: ModelIR) -> Iterator[tuple[str, str]]:
    """The ggml type of each weight of the checkpoint, under all its names; the output matrix's where they differ."""
    found, tensors, _ = read_file(artifact, ir)
    for slot in found:
        if slot.values or len(slot.shape) < 2:
            continue
        for source in slot.sources:
            if source.stored:
                name = tensors[slot.name].tensor_type.name
                yield source.stored, name
                yield from ((alias, name) for alias in source.tensor.aliases)


def _hook(module: Any, rounding: Round) -> None:
    module.register_forward_pre_hook(lambda _, inputs: (rounding(inputs[0]), *inputs[1:]))


def _rounding(type_name: str) -> Round:
    if type_name == "F32":
        return lambda x: x
    if type_name == "F16":
        return lambda x: x.half().float()
    return _q8_k if type_name.endswith("_K") else _q8_0


def _q8_0(x: torch.Tensor) -> torch.Tensor:
    blocks = x.reshape(-1, 32)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    steps = (blocks / scale).nan_to_num().round()
    return (steps * scale.half().float()).reshape(x.shape)


def _q8_k(x: torch.Tensor) -> torch.Tensor:
    blocks = x.reshape(-1, 256)
    largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    inverse = -127 / largest
    steps = (inverse * blocks).round().clamp(max=127)
    return (steps / inverse).nan_to_num().reshape(x.shape)
