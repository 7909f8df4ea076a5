"""The networkx view: what a dim cuts, what is coupled with it."""

from __future__ import annotations

import pytest
from tiny_configs import traced

from acc.depgraph import axes_of, coupled, dot, graph
from acc.diag import AccError


def test_what_a_cut_changes() -> None:
    ir = traced("llama")
    mlp = "model.layers.1.mlp"
    assert axes_of(ir, "ffn.1") == [
        (f"{mlp}.down_proj.weight", 1),
        (f"{mlp}.gate_proj.weight", 0),
        (f"{mlp}.up_proj.weight", 0),
    ]
    assert len(axes_of(ir, "hidden")) == 3 * 9 + 3  # seven matrices and two norms a layer; both tables, the last norm
    owned = {axis.tensor.removeprefix("model.layers.1.") for axis in axes_of(ir, "mlp.1")}
    assert owned == {f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")} | {"post_attention_layernorm.weight"}


def test_what_is_coupled() -> None:
    ir = traced("phi3")
    assert coupled(ir, "q_per_kv.0") == ["head_dim", "kv_group.0"]
    assert coupled(ir, "hidden") == []
    with pytest.raises(AccError, match="did you mean `hidden`"):
        coupled(ir, "hiden")


def test_dims_are_connected_through_tensors_only() -> None:
    made = graph(traced("qwen2"))
    kinds = {(made.nodes[a]["kind"], made.nodes[b]["kind"]) for a, b in made.edges}
    assert kinds <= {("dim", "axis"), ("axis", "dim")}


def test_dot_draws_a_dim_and_its_tensors() -> None:
    drawn = dot(traced("llama"), ["ffn.0"])
    assert '"ffn.0" -- "model.layers.0.mlp.down_proj.weight" [label="1"];' in drawn
    assert "20 of 20, free" in drawn
    assert "ffn.1" not in drawn
