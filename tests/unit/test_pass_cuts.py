"""Calibrate, order, uniform, slice and refit on tiny models of several families."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from on_tiny import Bench, traced

from acc import corpus, model
from acc.checkpoint import Checkpoint
from acc.diag import AccError
from acc.ir import Arch, Role
from acc.passes.analysis.calibrate import Calibrate
from acc.passes.analysis.order import Order
from acc.passes.masked import Masked
from acc.passes.moments import Moments
from acc.passes.quality import compare
from acc.passes.search.uniform import Uniform
from acc.passes.streaming import Stream, batches
from acc.passes.transform.refit import Refit
from acc.passes.transform.slice import Slice, read_orders, with_kept

pytestmark = pytest.mark.usefixtures("one_thread")
Calibrated = Callable[[str], Bench]
FAMILIES = ("llama", "gemma3", "phi3", "granite")


@pytest.fixture(scope="module")
def calibrated(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Calibrated:
    """A bench per family with moments and orders, made once."""
    made: dict[str, Bench] = {}

    def make(family: str) -> Bench:
        if family not in made:
            bench = Bench(traced(tiny_model(family)), tmp_path_factory.mktemp(f"bench-{family}"))
            bench.run(Calibrate(tokens=4096, length=64, batch=16))
            bench.run(Order())
            made[family] = bench
        return made[family].branch()

    return make


def heldout(bench: Bench, count: int = 8) -> torch.Tensor:
    """Samples that no pass has seen."""
    tokenizer = Checkpoint.at(bench.path("parent")).tokenizer()
    return corpus.samples(tokenizer, count=count, length=64, part="heldout")


def loss(bench: Bench) -> float:
    """KL of the current weights from the parent."""
    parent, child = (model.load(bench.path(kind)) for kind in ("parent", "weights"))
    return compare(parent, child, batches(heldout(bench), 8), lambda *_: None).kl_nats


@pytest.mark.parametrize("family", [*FAMILIES, "smollm3", "mistral"])
def test_streaming_equals_the_model(tiny_model: Callable[..., Path], family: str) -> None:
    whole = model.load(tiny_model(family))
    tokens = torch.arange(2 * 48).reshape(2, 48) % 380
    stream = Stream(whole)
    hidden = stream.run(stream.embed(tokens))
    with torch.no_grad():
        expected = whole(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(stream.logits(hidden), expected)
    positions = torch.tensor([3, 20, 47])
    torch.testing.assert_close(stream.logits(hidden, positions), expected[:, positions])


def test_moments_are_those_of_the_inputs(calibrated: Calibrated) -> None:
    bench = calibrated("llama")
    moments = Moments.read(bench.path("moments"))
    assert moments.tokens == 4096
    tokenizer = Checkpoint.at(bench.path("parent")).tokenizer()
    samples = corpus.samples(tokenizer, count=64, length=64)
    seen: list[torch.Tensor] = []
    whole = model.load(bench.path("parent"))
    module = whole.get_submodule("model.layers.2.mlp.down_proj")
    module.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, 1)))
    with torch.no_grad():
        whole(input_ids=samples, use_cache=False)
    x = seen[0]
    name = "model.layers.2.mlp.down_proj.weight"
    torch.testing.assert_close(moments[f"full/{name}"], x.T @ x / len(x), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(moments[f"diag/{name}"], x.square().mean(0), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(moments[f"absmean/{name}"], x.abs().mean(0), rtol=1e-3, atol=1e-4)


def test_every_matrix_has_a_diagonal_for_the_importance_matrix(calibrated: Calibrated) -> None:
    for family in FAMILIES:
        bench = calibrated(family)
        moments = Moments.read(bench.path("moments"))
        matrices = {name for name, tensor in bench.ir.tensors.items() if len(tensor.axes) == 2 and tensor.presence}
        assert matrices <= set(moments.names("diag"))
        assert any("lm_head" in name for name in moments.names("diag"))
        for gain in moments.names("norm"):
            # An unused token may embed as zeros, so the first norm's mean may stay below 1.
            assert 0.9 < float(moments[f"norm/{gain}"].mean()) < 1.0001


@pytest.mark.parametrize("order", [Order(), Order(method="actnorm"), Order(method="absmean")])
def test_orders_hold_every_index_once(calibrated: Calibrated, order: Order) -> None:
    bench = calibrated("llama")
    bench.run(order)
    orders = json.loads((bench.path("orders") / "orders.json").read_text())
    roles: tuple[Role, ...] = ("hidden", "ffn", "kv_group", "q_per_kv")
    free = [dim for role in roles for dim in bench.ir.select(role, free=True)]
    assert set(orders) == {dim.name for dim in free}
    for dim in free:
        assert sorted(orders[dim.name]) == list(range(dim.size))


def test_kept_indices_are_nested(calibrated: Calibrated) -> None:
    bench = calibrated("llama")
    orders = read_orders(bench.path("orders"))
    kept = [set(with_kept(bench.ir.resize({"ffn.1": size}), orders).kept("ffn.1")) for size in (80, 48, 16)]
    assert kept[0] > kept[1] > kept[2]
    assert [len(one) for one in kept] == [80, 48, 16]


def test_channels_that_do_nothing_go_first(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    from acc import checkpoint

    parent = Checkpoint.at(tiny_model("llama"))
    dead, names = [3, 41, 77], parent.names()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            value = parent.read(name).clone()
            if name == "model.layers.1.mlp.down_proj.weight":
                value[:, dead] = 0
            yield name, value

    folder = tmp_path / "model"
    checkpoint.write(folder, parent.config_json, tensors(), like=parent.folder)
    (tmp_path / "runs").mkdir()
    bench = Bench(traced(folder), tmp_path / "runs")
    bench.run(Calibrate(tokens=1024, length=64))
    for order in (Order(), Order(method="actnorm")):
        bench.run(order)
        assert set(read_orders(bench.path("orders"))["ffn.1"][-3:]) == set(dead)


@pytest.mark.parametrize("family", FAMILIES)
def test_slice_equals_mask(calibrated: Calibrated, family: str) -> None:
    bench = calibrated(family)
    sizes = {"ffn.0": 40, "ffn.2": 64, "hidden": 48, "mlp.1": 0, "attn.2": 0, "layer.3": 0}
    sizes |= {"kv_group.1": 1} if bench.ir.dims["kv_group.1"].state == "free" else {}
    sizes = {name: size for name, size in sizes.items() if bench.ir.dims[name].state == "free"}
    bench.ir = bench.ir.resize(sizes)
    bench.run(Slice())
    masked = Masked(bench.ir.with_arch(Arch()), model.load(bench.path("parent"), dtype=torch.float64))
    moments = Moments.read(bench.path("moments"))
    masked.put({name: value.double() for name, value in masked.cut(bench.ir, moments).items()})
    tokens = heldout(bench, 2)
    with torch.no_grad():
        mask = masked.model(input_ids=tokens, use_cache=False).logits
        cut = model.load(bench.path("weights"), dtype=torch.float64)(input_ids=tokens, use_cache=False).logits
    # The gains are stored in float32, and a norm over zeros has its epsilon in another place.
    torch.testing.assert_close(cut, mask, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_refit_is_better_on_text_it_has_not_seen(calibrated: Calibrated, family: str) -> None:
    bench = calibrated(family)
    bench.run(Uniform(ratio=0.5))
    bench.run(Slice())
    plain = loss(bench)
    facts = bench.run(Refit(tokens=4096, length=64, batch=16))
    assert facts["tokens"] == 4096
    assert facts["check_tokens"] == 1024
    assert facts["matrices"] == bench.ir.depth()
    assert loss(bench) < plain


def test_refit_of_a_narrower_stream_wins_back_most(calibrated: Calibrated) -> None:
    bench = calibrated("llama")
    bench.run(Uniform(hidden=48))
    bench.run(Slice())
    plain = loss(bench)
    bench.run(Refit(tokens=4096, length=64, batch=16))
    assert loss(bench) < 0.8 * plain


def test_refit_with_too_few_tokens_is_never_worse_than_the_plain_cut(calibrated: Calibrated) -> None:
    bench = calibrated("llama")
    bench.run(Uniform(ratio=0.5))
    bench.run(Slice())
    plain = loss(bench)
    facts = bench.run(Refit(tokens=64, length=16))
    assert facts["notes"][0]["code"] == "ACC435"
    assert loss(bench) < 1.05 * plain


def test_refit_leaves_everything_else_alone(calibrated: Calibrated) -> None:
    bench = calibrated("llama")
    bench.run(Uniform(ffn=64))
    bench.run(Slice())
    before = Checkpoint.at(bench.path("weights"))
    bench.run(Refit(tokens=1024, length=64))
    after = Checkpoint.at(bench.path("weights"))
    changed = {name for name in before.names() if not torch.equal(before.read(name), after.read(name))}
    assert changed == {f"model.layers.{index}.mlp.down_proj.weight" for index in range(4)}
    assert before.config_json == after.config_json


def test_uniform_refuses_what_a_dim_cannot_be(calibrated: Calibrated) -> None:
    bench = calibrated("llama")
    with pytest.raises(AccError, match=r"ACC431.*ffn.0: cannot be 97: it has 96"):
        bench.run(Uniform(ffn=97))
