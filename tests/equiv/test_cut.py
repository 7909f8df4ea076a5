"""Cutting equals masking, in float64, for every kind of dim on every family."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from masking import cut_model, logits, mask, random_parent
from tiny_configs import VARIANTS, traced

from acc.ir import Arch, ModelIR
from acc.verify import verify

ARCHS: dict[str, Arch] = {
    "ffn": Arch({"ffn.0": 11, "ffn.2": 1}, {"ffn.0": (0, 1, 2, 4, 7, 9, 11, 12, 13, 18, 19), "ffn.2": (17,)}),
    "kv_group": Arch({"kv_group.0": 1, "kv_group.2": 1}, {"kv_group.0": (1,), "kv_group.2": (0,)}),
    "q_per_kv": Arch({"q_per_kv.0": 2, "q_per_kv.1": 1}, {"q_per_kv.0": (0, 2), "q_per_kv.1": (2,)}),
    "hidden": Arch({"hidden": 15}, {"hidden": (0, 2, 3, 5, 6, 8, 9, 11, 12, 14, 15, 17, 18, 20, 23)}),
    "attention of the first layer": Arch({"attn.0": 0}),
    "mlp of the last layer": Arch({"mlp.2": 0}),
    "a layer": Arch({"layer.1": 0}),
    "both sub-blocks of a layer": Arch({"attn.0": 0, "mlp.0": 0}),
    "all at once": Arch(
        {"hidden": 16, "ffn.0": 3, "kv_group.2": 1, "q_per_kv.2": 2, "layer.1": 0, "attn.0": 0},
        {"hidden": tuple(range(3, 19)), "ffn.0": (2, 9, 10), "kv_group.2": (1,), "q_per_kv.2": (1, 2)},
    ),
}


def assert_cut_equals_masked(ir: ModelIR, *, changes: bool = True) -> None:
    assert verify(ir) == []
    ids = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(1))
    parent = random_parent(ir)
    before, child = logits(parent, ids), cut_model(ir, parent)
    assert sum(p.numel() for p in child.parameters()) == ir.parameters()
    mask(ir, parent)
    masked = logits(parent, ids)
    assert (logits(child, ids) - masked).abs().max() < 1e-9
    if changes:
        assert (before - masked).abs().max() > 1e-2, "the mask does nothing, so that the test proves nothing"


@pytest.mark.parametrize("kind", ARCHS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_cut_equals_masked(variant: str, kind: str) -> None:
    assert_cut_equals_masked(traced(variant).with_arch(ARCHS[kind]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_kept_tokens_are_the_same(variant: str) -> None:
    kept = (1, 2, 5, 6, 7, 11, 13, 20, 21, 30, 38, 39)
    ir = traced(variant).with_arch(Arch({"vocab": len(kept)}, {"vocab": kept}))
    parent = random_parent(ir)
    child = cut_model(ir, parent)
    ids = torch.randint(0, len(kept), (2, 9), generator=torch.Generator().manual_seed(1))
    expected = logits(parent, torch.tensor(kept)[ids])[..., list(kept)]
    assert (logits(child, ids) - expected).abs().max() < 1e-9
    assert child.config.bos_token_id == kept.index(1)
    assert child.config.eos_token_id == kept.index(2)


@st.composite
def archs(draw: st.DrawFn, ir: ModelIR) -> Arch:
    """Any valid Arch: some dims cut to some of their indices, some sub-blocks dropped, one at least left."""
    sizes: dict[str, int] = {}
    keep: dict[str, tuple[int, ...]] = {}
    for dim in ir.dims.values():
        if dim.state != "free" or dim.role == "vocab" or draw(st.booleans()):
            continue
        if dim.role in ("layer", "attn", "mlp"):
            if dim.name not in ("layer.1", "mlp.1"):
                sizes[dim.name] = 0
            continue
        kept = draw(st.sets(st.integers(0, dim.size - 1), min_size=1))
        sizes[dim.name], keep[dim.name] = len(kept), tuple(sorted(kept))
    return Arch(sizes, keep)


@pytest.mark.parametrize("variant", ["qwen3", "phi3"])
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_any_architecture(variant: str, data: st.DataObject) -> None:
    ir = traced(variant)
    assert_cut_equals_masked(ir.with_arch(data.draw(archs(ir))), changes=False)
