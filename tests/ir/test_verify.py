"""The verifier: every broken invariant is found and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tiny_configs import traced

from acc.diag import AccError
from acc.ir import Arch, Dim, ModelIR, Tensor
from acc.verify import check, verify

Q = "model.layers.0.self_attn.q_proj.weight"


def with_dim(ir: ModelIR, dim: str, /, **changes: object) -> ModelIR:
    return replace(ir, dims={**ir.dims, dim: replace(ir.dims[dim], **changes)})  # type: ignore[arg-type]


def with_tensor(ir: ModelIR, name: str, **changes: object) -> ModelIR:
    return replace(ir, tensors={**ir.tensors, name: replace(ir.tensors[name], **changes)})  # type: ignore[arg-type]


def with_arch(**sizes: int) -> Callable[[ModelIR], ModelIR]:
    return lambda ir: ir.with_arch(Arch({name.replace("__", "."): size for name, size in sizes.items()}))


def with_keep(name: str, size: int, kept: tuple[int, ...]) -> Callable[[ModelIR], ModelIR]:
    return lambda ir: ir.with_arch(Arch({name: size}, {name: kept}))


BROKEN: dict[str, tuple[Callable[[ModelIR], ModelIR], str, str]] = {
    "renamed dim": (lambda ir: with_dim(ir, "hidden", name="width"), "dim hidden", "is called `width` inside"),
    "absurd size": (lambda ir: with_dim(ir, "ffn.0", size=-3), "dim ffn.0", "cannot have the size -3"),
    "pinned without reason": (lambda ir: with_dim(ir, "ffn.0", state="pinned"), "dim ffn.0", "without a reason"),
    "unknown role": (lambda ir: with_dim(ir, "ffn.0", role="width"), "dim ffn.0", "unknown role"),
    "name twice": (lambda ir: with_tensor(ir, Q, aliases=("lm_head.weight",)), "lm_head.weight", "2 tensors"),
    "unknown dim": (
        lambda ir: with_tensor(ir, Q, axes=((("ffn.9",),), (("hidden",),))),
        f"tensor {Q}",
        "no dim `ffn.9`",
    ),
    "dim of another layer": (
        lambda ir: with_tensor(ir, Q, axes=((("ffn.1",),), (("hidden",),))),
        f"tensor {Q}",
        "uses dim `ffn.1`, which belongs to model.layers.1",
    ),
    "odd presence": (lambda ir: with_tensor(ir, Q, presence=("ffn.0",)), f"tensor {Q}", "not a presence dim"),
    "axis product": (
        lambda ir: with_tensor(ir, Q, axes=((("kv_group.0", "head_dim"),), (("hidden",),))),
        f"tensor {Q}",
        "axis 0 makes 8 elements, the traced op `linear` has 24",
    ),
    "too large": (with_arch(ffn__0=21), "dim ffn.0", "cannot have the size 21: the traced model has 20"),
    "pinned dim cut": (with_arch(head_dim=2), "dim head_dim", "is pinned and must stay 4, not 2"),
    "zero ffn": (with_arch(ffn__0=0), "dim ffn.0", "has the size 0 in tensors that are present"),
    "unknown dim in arch": (with_arch(fnn__0=1), "arch", "there is no dim `fnn.0`"),
    "too few kept": (with_keep("ffn.0", 3, (1, 2)), "dim ffn.0", "2 indices are kept, its size is 3"),
    "unsorted": (with_keep("ffn.0", 2, (2, 1)), "dim ffn.0", "not in strictly ascending order"),
    "kept twice": (with_keep("ffn.0", 2, (1, 1)), "dim ffn.0", "not in strictly ascending order"),
    "out of range": (with_keep("ffn.0", 2, (1, 20)), "dim ffn.0", "index 20 is kept, the traced model has 0 to 19"),
    "nothing left": (
        with_arch(layer__0=0, layer__1=0, attn__2=0, mlp__2=0),
        "arch",
        "no sub-block of any layer is left",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_named(name: str) -> None:
    damage, where, message = BROKEN[name]
    found = verify(damage(traced("llama")))
    assert [one.where for one in found] == [where]
    assert message in found[0].message


def test_a_sub_block_that_is_dropped_may_have_any_size() -> None:
    ir = traced("llama").with_arch(Arch({"mlp.0": 0, "ffn.0": 0, "layer.1": 0, "kv_group.1": 0}))
    assert verify(ir) == []


def test_check_raises_with_a_hint() -> None:
    with pytest.raises(AccError, match=r"to drop the sub-block, set `mlp.0` to 0"):
        check(with_arch(ffn__0=0)(traced("llama")))


def test_a_hand_made_ir_is_checked_too() -> None:
    ir = ModelIR("toy", {}, {"a": Dim("a", "other", 2)}, {"t": Tensor("t", ((("a",),),), "F32")})
    assert verify(ir) == []
    assert "did you mean `a`" in str(verify(ir.with_arch(Arch({"aa": 1})))[0])
