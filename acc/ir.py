"""The ModelIR: named dims, tensors whose axes are made of them, the Arch that gives the dims their sizes.

Everything here is an immutable value. A dim is a dimension of the *traced* model; an `Arch` says how much of each dim
is kept. The shape of a tensor, the number of parameters and the bytes of KV cache are functions of the two.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from acc.diag import AccError

Role = Literal["hidden", "ffn", "kv_group", "q_per_kv", "head_dim", "vocab", "layer", "attn", "mlp", "expert", "other"]
State = Literal["free", "pinned", "const"]
Segment = tuple[str, ...]
"""An ordered product of dim names, major to minor: `("kv_group.3", "q_per_kv.3", "head_dim")`."""
Axis = tuple[Segment, ...]
"""A concatenation of segments; a fused qkv row axis has three."""

PRESENCE_ROLES: tuple[Role, ...] = ("layer", "attn", "mlp")
"""Roles of dims of size 1 whose removal (size 0) drops a whole layer or sub-block."""


@dataclass(frozen=True)
class Dim:
    """One named dimension of the traced model.

    Attributes:
        name: unique, e.g. `hidden`, `ffn.3`, `kv_group.3`, `attn.3`.
        size: in the traced model.
        scope: the module path of the layer that it belongs to, or "" for a global dim.
        state: free (may be cut), pinned (may not, see `why`), const (a constant of the code, such as the 2 of a pair).
        why: the reason why the dim is pinned, for `acc inspect`.
    """

    name: str
    role: Role
    size: int
    scope: str = ""
    state: State = "free"
    why: str = ""

    @property
    def layer(self) -> int | None:
        """The layer number of a per-layer dim, from its name; None for a global dim."""
        _, dot, number = self.name.rpartition(".")
        return int(number) if dot and number.isdigit() else None


@dataclass(frozen=True)
class Rescale:
    """The code multiplies by a power of a dim's size (Gemma: token embeddings by its root), which a cut would change.

    So that the product stays, a cut value v becomes (v + offset) * (traced size / kept size) ** power - offset.
    """

    dim: str
    power: float
    offset: float = 0.0


@dataclass(frozen=True)
class Tensor:
    """One stored tensor (a parameter or a persistent buffer).

    Attributes:
        name: its key in the checkpoint.
        axes: one Axis per dimension.
        dtype: a safetensors name, such as `F32` or `BF16`.
        presence: the presence dims that it exists under, outermost first: `("layer.3", "attn.3")`.
        aliases: further checkpoint keys that share the storage (a tied `lm_head.weight`).
        rescale: what a cut of a dim does to the values, or None.
    """

    name: str
    axes: tuple[Axis, ...]
    dtype: str
    presence: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    rescale: Rescale | None = None


@dataclass(frozen=True)
class Op:
    """One node of the traced graph: its aten name, the values it reads, and the concrete shape it returns."""

    name: str
    target: str
    inputs: tuple[str, ...]
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Arch:
    """What is kept of each dim. A dim that is not named is whole.

    Attributes:
        sizes: kept size per dim name.
        keep: kept indices per dim name, ascending in the parent's numbering; set once an order has chosen them.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    keep: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A JSON value with sorted names."""
        return {
            "sizes": dict(sorted(self.sizes.items())),
            "keep": {name: list(kept) for name, kept in sorted(self.keep.items())},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Arch:
        """The inverse of `to_json`."""
        return cls(dict(data["sizes"]), {name: tuple(kept) for name, kept in data["keep"].items()})


@dataclass(frozen=True)
class LayerShape:
    """One decoder layer in numbers; 0 heads: no attention; 0 ffn: no MLP."""

    heads: int
    kv_heads: int
    ffn: int

    @property
    def dropped(self) -> bool:
        """Whether nothing is left of the layer."""
        return self.heads == 0 and self.ffn == 0


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder in numbers: what cost models, lowerings and drawings need to know of an Arch."""

    hidden: int
    vocab: int
    head_dim: int
    layers: tuple[LayerShape, ...]
    tied: bool

    @property
    def uniform(self) -> bool:
        """Whether all layers that are present have the same shape and none has lost a sub-block."""
        present = {layer for layer in self.layers if not layer.dropped}
        return len(present) == 1 and all(layer.heads and layer.ffn for layer in present)

    def kv_bytes_per_token(self, element_bytes: float = 2.0) -> float:
        """Bytes of K and V cache that one token takes, over all layers."""
        return sum(2 * layer.kv_heads * self.head_dim * element_bytes for layer in self.layers)


@dataclass(frozen=True)
class Artifact:
    """A file or folder that a pass left: `path` relative to the store, absolute for the user's own; `digest` of it."""

    path: str
    digest: str


@dataclass(frozen=True)
class ModelIR:
    """The traced graph: ops, tensors, and the named dims their axes are made of.

    Attributes:
        family: Transformers' `model_type`.
        config: the Hugging Face configuration of the traced (parent) model, as JSON.
        dims: by name.
        tensors: by name; tied storage appears once.
        ops: the traced graph in execution order.
        arch: what is kept of each dim.
        artifacts: what passes left, by kind: `weights` (a Hugging Face folder; the parent's until `slice`), `moments`,
            `orders`, `gguf`...
    """

    family: str
    config: Mapping[str, Any]
    dims: Mapping[str, Dim]
    tensors: Mapping[str, Tensor]
    ops: tuple[Op, ...] = ()
    arch: Arch = field(default_factory=Arch)
    artifacts: Mapping[str, Artifact] = field(default_factory=dict)

    def select(self, role: Role, *, free: bool = False) -> list[Dim]:
        """The dims of one role, in layer order; with `free`, those that may be cut."""
        found = [dim for dim in self.dims.values() if dim.role == role and (not free or dim.state == "free")]
        return sorted(found, key=lambda dim: (dim.layer if dim.layer is not None else -1, dim.name))

    def size(self, dim: str) -> int:
        """The kept size of a dim."""
        return self.arch.sizes.get(dim, self.dims[dim].size)

    def kept(self, dim: str) -> tuple[int, ...]:
        """The kept indices of a dim; the first `size` ones where no order has chosen."""
        return self.arch.keep.get(dim, tuple(range(self.size(dim))))

    def present(self, tensor: Tensor) -> bool:
        """Whether the Arch still has the tensor."""
        return all(self.size(dim) for dim in tensor.presence)

    def axis_size(self, axis: Axis) -> int:
        """The kept size of an axis: the sum over segments of the product of their dims."""
        return sum(math.prod(self.size(dim) for dim in segment) for segment in axis)

    def axis_indices(self, axis: Axis) -> list[int]:
        """The kept flat indices of an axis in the parent's tensor: mixed-radix products of kept ones, per segment."""
        found: list[int] = []
        offset = 0
        for segment in axis:
            flat = [0]
            for name in segment:
                size, kept = self.dims[name].size, self.kept(name)
                flat = [major * size + minor for major in flat for minor in kept]
            found += [offset + index for index in flat]
            offset += math.prod(self.dims[name].size for name in segment)
        return found

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        """The kept shape of a tensor."""
        return tuple(self.axis_size(axis) for axis in tensor.axes)

    def parameters(self) -> int:
        """Parameters that the Arch keeps; tied storage counts once."""
        return sum(math.prod(self.shape(tensor)) for tensor in self.tensors.values() if self.present(tensor))

    def depth(self) -> int:
        """Layers of the traced model."""
        return len(self.select("layer"))

    def model_shape(self) -> ModelShape:
        """The Arch of a dense decoder in numbers, dropped layers included as zeros.

        Raises:
            AccError: the model is of another kind (experts, state-space layers), so that some numbers do not exist.
        """
        roles = ("layer", "attn", "mlp", "kv_group", "q_per_kv", "ffn")
        needed = {"hidden", "vocab"} | {f"{role}.{index}" for index in range(self.depth()) for role in roles}
        missing = sorted(needed - self.dims.keys())
        if missing or not self.depth():
            what = f"it has no `{missing[0]}`" if missing else "it has no layers"
            raise AccError.of(
                "ACC203", self.family, f"is not a dense decoder: {what}", "`acc inspect` shows the dims that it has"
            )
        layers = tuple(self._layer_shape(index) for index in range(self.depth()))
        return ModelShape(
            self.size("hidden"),
            self.size("vocab"),
            self.head_dim(),
            layers,
            any(tensor.aliases for tensor in self.tensors.values()),
        )

    def head_dim(self) -> int:
        """The size of one attention head, which is never cut."""
        return int(self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"])

    def _layer_shape(self, index: int) -> LayerShape:
        def size(role: str) -> int:
            return self.size(f"{role}.{index}")

        has_attention = size("layer") and size("attn")
        groups = size("kv_group") if has_attention else 0
        ffn = size("ffn") if size("layer") and size("mlp") else 0
        return LayerShape(groups * size("q_per_kv") if groups else 0, groups, ffn)

    def with_arch(self, arch: Arch) -> ModelIR:
        """The same model with another Arch."""
        return replace(self, arch=arch)

    def resize(self, sizes: Mapping[str, int]) -> ModelIR:
        """The same model with some sizes changed; kept indices of the changed dims are forgotten."""
        keep = {name: kept for name, kept in self.arch.keep.items() if name not in sizes}
        return self.with_arch(Arch({**self.arch.sizes, **sizes}, keep))

    def with_artifacts(self, **artifacts: Artifact) -> ModelIR:
        """The same model with artifacts added or replaced."""
        return replace(self, artifacts={**self.artifacts, **artifacts})

    def digest(self) -> str:
        """A sha256 of everything that the IR says."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The whole IR as a JSON value; `acc.text` has the form for people."""
        return {
            "family": self.family,
            "config": dict(self.config),
            "dims": [[d.name, d.role, d.size, d.scope, d.state, d.why] for d in self.dims.values()],
            "tensors": [
                [t.name, t.axes, t.dtype, t.presence, t.aliases, vars(t.rescale) if t.rescale else None]
                for t in self.tensors.values()
            ],
            "ops": [[o.name, o.target, o.inputs, o.shape] for o in self.ops],
            "arch": self.arch.to_json(),
            "artifacts": {kind: [a.path, a.digest] for kind, a in sorted(self.artifacts.items())},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelIR:
        """The inverse of `to_json`."""
        dims = [Dim(*row) for row in data["dims"]]
        tensors = [
            Tensor(
                name,
                tuple(tuple(tuple(segment) for segment in axis) for axis in axes),
                dtype,
                tuple(presence),
                tuple(aliases),
                Rescale(**rescale) if rescale else None,
            )
            for name, axes, dtype, presence, aliases, rescale in data["tensors"]
        ]
        return cls(
            data["family"],
            data["config"],
            {d.name: d for d in dims},
            {t.name: t for t in tensors},
            tuple(Op(name, target, tuple(inputs), tuple(shape)) for name, target, inputs, shape in data["ops"]),
            Arch.from_json(data["arch"]),
            {kind: Artifact(path, digest) for kind, (path, digest) in data["artifacts"].items()},
        )


def present_tensors(ir: ModelIR) -> Iterator[Tensor]:
    """The tensors that the Arch still has, in the checkpoint's order."""
    return (tensor for tensor in ir.tensors.values() if ir.present(tensor))


def dims_of(axes: Iterable[Axis]) -> set[str]:
    """The names of all dims that some axes are made of."""
    return {name for axis in axes for segment in axis for name in segment}
