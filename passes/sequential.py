"""Sequential least squares: layer by layer, with inputs from the cut prefix and targets from the whole parent.

A matrix W of the parent sees inputs x; in the cut model it sees x̂, and the residual stream around it is off by δ. The
refit V of its kept columns minimises

    E ‖V x̂_K − (W x̂ + γ (W (x − x̂) + δ))‖² + ridge ‖V − W_K‖²

γ = 0 only makes up for the columns that are gone (a one-shot refit on the cut model's own inputs), γ = 1 also tries to
undo all that went wrong before, which overfits. Matrices that read a cut stream have no x̂ beyond its kept coordinates;
their target is the parent's output W x. The ridge, or no refit at all, is chosen on other tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from acc.ir import ModelIR, Tensor, dims_of
from acc.passes import least_squares as ls
from acc.passes.masked import Masked
from acc.passes.streaming import Stream, watch_inputs
from acc.passes.structure import layer_of
from acc.passes_api import Progress

RIDGES = (0.01, 0.05, 0.2, 1.0)
"""Candidates, as fractions of the mean diagonal."""
LINEAR = 1e-3
"""Relative error under which a writer's output counts as added to the stream as it is, times a number."""
States = list[torch.Tensor]


class Grams:
    """Sums over tokens for one matrix: `own` x̂ x̂ᵀ in the cut model, `parent` x x̂ᵀ, `stream` δ x̂ᵀ; [.., in]."""

    def __init__(self) -> None:
        self.rows = 0
        self.own = self.parent = self.stream = torch.zeros(())

    def add(self, x_cut: torch.Tensor, x: torch.Tensor, delta: torch.Tensor | None) -> None:
        """Add some rows: x̂ and x [rows, in], δ [rows, out] or None for zero."""
        self.rows += len(x_cut)
        self.own = self.own + x_cut.T @ x_cut
        self.parent = self.parent + x.T @ x_cut
        if delta is not None:
            self.stream = self.stream + delta.T @ x_cut

    def target(self, weight: torch.Tensor, gamma: float) -> torch.Tensor:
        """E y x̂ᵀ [out, in] of the target y."""
        return (weight @ ((1 - gamma) * self.own + gamma * self.parent) + gamma * self.stream) / self.rows


@dataclass
class Outcome:
    """What a sequential refit gives.

    Attributes:
        values: matrices in the parent's shapes, zero where cut.
        ridges: the ridge chosen for each; None where the plain cut was better on the check tokens.
    """

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    ridges: dict[str, float | None] = field(default_factory=dict)


class Sequential:
    """A run over all layers. One model serves as parent and as cut model in turn, a layer at a time.

    Args:
        masked: the parent.
        arch: the cut model, kept indices chosen; `plain`: its tensors by `Masked.cut`.
        fit: samples in batches; `check`: other samples, for the choice of the ridge.
        gamma: share of the accumulated error that the targets make up for.
    """

    def __init__(
        self,
        masked: Masked,
        arch: ModelIR,
        plain: Mapping[str, torch.Tensor],
        fit: Sequence[torch.Tensor],
        check: Sequence[torch.Tensor],
        gamma: float = 0.5,
        ridges: Sequence[float] = RIDGES,
    ) -> None:
        self.masked, self.arch, self.plain = masked, arch, plain
        self.stream = Stream(masked.model)
        self.fit, self.check = list(fit), list(check)
        self.gamma, self.ridges = gamma, ridges
        self.hidden_cut = any(arch.size(d.name) < d.size for d in arch.select("hidden"))
        self.outcome = Outcome()

    @torch.no_grad()
    def run(self, progress: Progress) -> Outcome:
        """Refit all layers in order."""
        outside = [name for name in self.plain if layer_of(self.arch, self.arch.tensors[name]) is None]
        batches = self.fit + self.check
        whole = [self.stream.embed(tokens) for tokens in batches]
        self.masked.put({name: self.plain[name] for name in outside})
        cut = [self.stream.embed(tokens) for tokens in batches]
        self.masked.restore(outside)
        for index in range(len(self.stream.layers)):
            progress(index, len(self.stream.layers), f"layer {index}")
            whole, cut = self._layer(index, whole, cut)
        progress(len(self.stream.layers), len(self.stream.layers))
        return self.outcome

    def _layer(self, index: int, whole: States, cut: States) -> tuple[States, States]:
        """Refit one layer; the hidden states that leave it, of the parent and of the cut model."""
        names = self.masked.of_layer(index)
        parent = _ParentLayer(self.masked, self.stream, index, whole)
        if self.arch.size(f"layer.{index}"):
            self.masked.put({name: self.plain[name] for name in names if name in self.plain})
            for stage in parent.stages:
                wanted = [tensor for tensor in stage if self._wanted(tensor)]
                if wanted:
                    self._stage(index, wanted, parent, cut)
            cut = [self.stream.layer(index, states) for states in cut]
            self.masked.restore(names)
        return parent.out, cut

    def _wanted(self, tensor: Tensor) -> bool:
        """Whether a refit can make up for something: a cut input axis, or a cut stream around it."""
        if not self.arch.present(tensor):
            return False
        return self.hidden_cut or any(self.arch.size(d) < self.arch.dims[d].size for d in dims_of(tensor.axes[1:]))

    def _stage(self, index: int, stage: list[Tensor], parent: _ParentLayer, cut: States) -> None:
        """Refit the matrices that share one input, and put them into the model."""
        name = stage[0].name
        last = name == parent.writers[-1]
        if last:  # without it the layer returns the stream that it writes to
            self.masked.put({name: torch.zeros_like(self.masked.original[name])})
        fit, check = Grams(), Grams()
        for batch, states in enumerate(cut):
            x_cut, out = self.stream.layer_until(index, states, self.masked.module(name), whole=last)
            delta = parent.delta(name, batch, out if last else states)
            (fit if batch < len(self.fit) else check).add(x_cut, parent.inputs[name][batch], delta)
        for tensor in stage:
            self.masked.put({tensor.name: self._solve(tensor, fit, check)})

    def _solve(self, tensor: Tensor, fit: Grams, check: Grams) -> torch.Tensor:
        """The matrix in the parent's shape, with the ridge that is best on the check tokens, or the plain cut."""
        original = self.masked.original[tensor.name]
        plain = self.plain.get(tensor.name, original).float()
        kept = torch.tensor(self.arch.axis_indices(tensor.axes[1]))
        rows = torch.zeros(len(plain), 1)
        rows[self.arch.axis_indices(tensor.axes[0])] = 1
        gamma = self.gamma if tensor.name in self.masked.consuming else 1.0
        weight, prior = original.float(), plain[:, kept]
        inner, cross = fit.own[kept][:, kept] / fit.rows, fit.target(weight, gamma)[:, kept]
        judge, wanted = check.own[kept][:, kept] / check.rows, check.target(weight, gamma)[:, kept]

        def error(value: torch.Tensor) -> float:
            return float(((value @ judge - 2 * wanted) * value * rows).sum())

        found: dict[float | None, torch.Tensor] = {None: prior}
        found |= {ridge: ls.solve(prior, inner, cross, ridge) * rows for ridge in self.ridges}
        best = min(found, key=lambda ridge: error(found[ridge]))
        self.outcome.ridges[tensor.name] = best
        value = torch.zeros_like(plain)
        value[:, kept] = found[best]
        self.outcome.values[tensor.name] = value.to(original.dtype)
        return self.outcome.values[tensor.name]


class _ParentLayer:
    """What the parent does in one layer.

    Attributes:
        stages: its matrices, those with the same input together, in the order in which they run.
        writers: the names of the consuming matrices in that order; they write to the residual stream.
        inputs: of the first matrix of each stage, by its name and batch.
        out: the hidden states that leave the layer, by batch.
    """

    def __init__(self, masked: Masked, stream: Stream, index: int, states: States) -> None:
        self.masked, self.stream, self.index, self.states = masked, stream, index, states
        self.stages = self._stages(states[0])
        self.writers = [t.name for stage in self.stages for t in stage if t.name in masked.consuming]
        self.inputs: dict[str, list[torch.Tensor]] = {stage[0].name: [] for stage in self.stages}
        modules = {name: masked.module(name) for name in self.inputs}
        with watch_inputs(modules, lambda name, x: self.inputs[name].append(x)):
            self.out = [stream.layer(index, batch) for batch in states]
        self.gains = self._gains()
        self.bases = {name: self._base(name) for name in self.gains}

    def delta(self, name: str, batch: int, cut: torch.Tensor) -> torch.Tensor | None:
        """How far the stream that a writer adds to is off in the cut model, in units of the writer's output; None
        for a matrix that is no writer, or whose output passes a norm before it is added."""
        if name not in self.gains:
            return None
        return ((self.bases[name][batch] - cut) / self.gains[name]).reshape(-1, cut.shape[-1])

    def _base(self, name: str) -> States:
        """The stream that a writer adds to, by batch."""
        if name != self.writers[-1]:
            return self.states
        outputs = (self._written(name, batch).view_as(out) for batch, out in enumerate(self.out))
        return [out - self.gains[name] * output for out, output in zip(self.out, outputs, strict=True)]

    def _stages(self, hidden: torch.Tensor) -> list[list[Tensor]]:
        order: dict[int, list[Tensor]] = {}
        inputs: list[torch.Tensor] = []  # keeps the inputs alive, so that their places stay different

        def see(name: str, x: torch.Tensor) -> None:
            inputs.append(x)
            order.setdefault(x.data_ptr(), []).append(self.masked.ir.tensors[name])

        with watch_inputs(self.masked.linear(self.index), see):
            self.stream.layer(self.index, hidden)
        return list(order.values())

    def _written(self, name: str, batch: int) -> torch.Tensor:
        """The output [rows, out] of a writer, while the parent's tensors are in place."""
        written: torch.Tensor = self.masked.module(name)(self.inputs[name][batch])
        return written

    def _gains(self) -> dict[str, float]:
        """By what each of two writers' outputs is multiplied before it is added to the stream, found by leaving the
        last one out; a writer for which that is no single number is left out."""
        if len(self.writers) != 2:
            return {}
        first, last = self.writers
        restore = self.masked.original[last]
        outputs = [self._written(name, 0) for name in self.writers]
        self.masked.put({last: torch.zeros_like(restore)})
        middle = self.stream.layer(self.index, self.states[0])
        self.masked.put({last: restore})
        changes = (middle - self.states[0], self.out[0] - middle)
        found = {}
        for name, change, output in zip((first, last), changes, outputs, strict=True):
            flat = change.reshape(output.shape)
            gain = float((flat * output).sum() / output.square().sum())
            if float((flat - gain * output).norm()) < LINEAR * float(flat.norm()):
                found[name] = gain
        return found
