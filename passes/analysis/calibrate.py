"""`calibrate`: statistics of the parent's activations over packed samples, streamed layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from acc.ir import ModelIR
from acc.passes.moments import Means, Moments
from acc.passes.streaming import Stream, batches, watch_inputs, watch_outputs
from acc.passes.structure import consumers, gains, module_of
from acc.passes_api import Context, Pass, PassResult

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HEAD_STRIDE = 8
"""The output layer's inputs are taken at every eighth position: few tokens do for them, and the product is dear."""


class Calibrate(Pass):
    """Second moments of the inputs of every projection, and what the norms pass on, over packed samples.

    Options:
        tokens: how many, in whole samples.
        length: tokens per sample.
        data: text, JSONL or Parquet files; the corpus inside the package if empty.
        batch: samples that run together.
    """

    name = "calibrate"
    kind = "analysis"
    needs = ("parent",)
    gives = ("moments",)
    reads = ()

    tokens: int = 16384
    length: int = 512
    data: tuple[str, ...] = ()
    batch: int = 4

    def run(self, ir: ModelIR, ctx: Context) -> PassResult:
        from acc import checkpoint, corpus, model

        folder = ctx.path(ir.artifacts["parent"])
        samples = corpus.samples(
            checkpoint.Checkpoint.at(folder).tokenizer(),
            count=max(1, self.tokens // self.length),
            length=self.length,
            sources=[Path(path) for path in self.data],
            seed=ctx.seed,
            part="calibration",
        )
        moments = measure(ir, model.load(folder, dtype=torch.float32), samples, self.batch, ctx)
        moments.write(ctx.scratch / "moments")
        facts = {"tokens": moments.tokens, "samples": len(samples), "length": self.length}
        return PassResult(ir.with_artifacts(moments=ctx.artifact("moments")), facts)


def measure(ir: ModelIR, model: PreTrainedModel, samples: torch.Tensor, batch: int, ctx: Context) -> Moments:
    """The moments of a model over samples [count, length]; memory holds the hidden states of all samples."""
    stream, means = Stream(model), Means()
    watch = _Watch(ir, model, means)
    hidden = [stream.embed(tokens) for tokens in batches(samples, batch)]
    for index, layer in enumerate(stream.layers):
        ctx.progress(index, len(stream.layers), f"layer {index}")
        with watch.over(layer):
            for at, states in enumerate(hidden):
                means.add(f"stream/{index}", states.square().mean(-1).sum(), states.shape[0] * states.shape[1])
                hidden[at] = stream.layer(index, states)
    positions = torch.arange(0, samples.shape[1], HEAD_STRIDE)
    with watch.over(model, outside=stream.layers):
        for states in hidden:
            means.add(f"stream/{len(stream.layers)}", states.square().mean(-1).sum(), states.shape[0] * states.shape[1])
            stream.logits(states, positions)
    ctx.progress(len(stream.layers), len(stream.layers))
    meta = {"samples": samples.shape[0], "length": samples.shape[1]}
    return Moments(samples.numel(), watch.named(means.means()), meta)


class _Watch:
    """Which modules to watch, and what to add up of what they see."""

    def __init__(self, ir: ModelIR, model: PreTrainedModel, means: Means) -> None:
        self.means = means
        self.paths = {module: path for path, module in model.named_modules()}
        self.gains = {module_of(tensor) for tensor in gains(ir)}
        self.alias = {alias: tensor.name for tensor in ir.tensors.values() for alias in tensor.aliases}
        roles = [*ir.select("ffn"), *ir.select("kv_group")]
        self.full = {consumer.tensor.name for dim in roles for consumer in consumers(ir, dim.name)}

    @contextmanager
    def over(self, root: nn.Module, outside: Sequence[nn.Module] = ()) -> Iterator[None]:
        """Watch the modules below `root` that are not in one of `outside`."""
        inner = {module for other in outside for module in other.modules()}
        found = {f"{self.paths[m]}.weight": m for m in root.modules() if m not in inner}
        linear = {name: module for name, module in found.items() if isinstance(module, nn.Linear)}
        norms = {name: module for name, module in found.items() if self.paths[module] in self.gains}
        with (
            watch_inputs(linear, self.linear_input),
            watch_inputs(norms, self.norm_input),
            watch_outputs(norms, self.norm_output),
        ):
            yield

    def linear_input(self, name: str, x: torch.Tensor) -> None:
        self.means.add(f"diag/{name}", x.square().sum(0), len(x))
        self.means.add(f"absmean/{name}", x.abs().sum(0), len(x))
        if name in self.full:
            self.means.add(f"full/{name}", x.T @ x, len(x))

    def norm_input(self, name: str, x: torch.Tensor) -> None:
        square = x.square()
        mean = square.mean(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)  # an unused token may embed as zeros
        self.means.add(f"norm/{name}", (square / mean).sum(0), len(x))

    def norm_output(self, name: str, x: torch.Tensor) -> None:
        self.means.add(f"norm_output/{name}", x.square().sum(0), len(x))
        self.means.add(f"norm_absmean/{name}", x.abs().sum(0), len(x))

    def named(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Keys of a tied output layer, which is watched under its module's name, repeated under its tensor's."""
        again = {}
        for key, value in values.items():
            kind, _, name = key.partition("/")
            if name in self.alias:
                again[f"{kind}/{self.alias[name]}"] = value.clone()
        return values | again
