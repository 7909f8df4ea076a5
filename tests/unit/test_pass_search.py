"""Puzzle and minitron on tiny models, with a cost model that counts bytes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from on_tiny import Bench, CountingBackend, CountingCosts, grid, silent, target, traced

from acc import pipeline
from acc.backend_api import Grid
from acc.diag import AccError, NoArchFits
from acc.ir import Arch
from acc.passes.analysis.calibrate import Calibrate
from acc.passes.analysis.order import Order
from acc.passes.search import choose
from acc.passes.search.evolve import evolve
from acc.passes.search.limits import Budget, linear
from acc.passes.search.minitron import Minitron
from acc.passes.search.puzzle import Puzzle
from acc.passes.search.space import Choice, Space, model_shape, on_grid, sizes_of, space_of
from acc.passes.search.study import Study
from acc.passes.transform.slice import Slice
from acc.target import Workload

pytestmark = pytest.mark.usefixtures("one_thread")
QUICK = Puzzle(tokens=512, length=64, fit=1024, evolve=4, ffn=3, widths=1, hidden=1)
WORKLOAD = Workload("test", 64, 16)


@pytest.fixture(scope="module")
def ready(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A tiny llama with moments and orders, and a backend with a grid."""
    backend = CountingBackend(grid(ffn=16, hidden=16, kv_group=1, q_per_kv=1))
    bench = Bench(traced(tiny_model("llama")), tmp_path_factory.mktemp("search"), backend)
    bench.run(Calibrate(tokens=2048, length=64, batch=16))
    bench.run(Order())
    return bench


def under(bench: Bench, *limits: str) -> Bench:
    """A branch with limits."""
    found = bench.branch()
    found.target = target(*limits)
    return found


def room(bench: Bench) -> dict[str, float]:
    """How far below each limit the chosen architecture is predicted, recomputed from the model's own numbers."""
    assert bench.target is not None
    costs = CountingCosts()
    parent = costs.predict(bench.ir.with_arch(Arch()).model_shape(), WORKLOAD)
    child = costs.predict(bench.ir.model_shape(), WORKLOAD)
    return {
        limit.name: -limit.resolve(getattr(parent, limit.name).value).violation(getattr(child, limit.name).value)
        for limit in bench.target.limits
    }


@pytest.mark.parametrize(
    "limits",
    [("tpot=0.8x",), ("tpot=0.6x", "memory=0.9x"), ("memory=0.7x",), ("throughput=1.4x",), ("ttft=0.75x",)],
)
def test_puzzle_keeps_every_limit_with_its_margin(ready: Bench, limits: tuple[str, ...]) -> None:
    bench = under(ready, *limits)
    facts = bench.run(QUICK)
    for name, spare in room(bench).items():
        assert spare >= (0 if name == "memory" else 0.0195), name  # memory is exact, so it needs no margin
    assert facts["kl_nats"] > 0
    assert all(one["room"] >= 0 for one in facts["predicted"].values())
    bench.run(Slice())


def test_puzzle_prefers_the_better_of_its_starts_and_counts_its_tokens(ready: Bench) -> None:
    facts = under(ready, "tpot=0.7x").run(QUICK)
    assert facts["kl_nats"] <= min(start["kl_nats"] for start in facts["starts"])
    wholes = len(facts["starts"]) + facts["evolution"]["trials"] + 1
    least = facts["scoring_tokens"] * (len(facts["block_scores_nats"]) + wholes)
    assert least <= facts["tokens_spent"] <= least + 128 * (facts["evolution"]["trials"] + 1)


def test_puzzle_is_the_same_again(ready: Bench) -> None:
    benches = [under(ready, "tpot=0.7x") for _ in range(2)]
    for bench in benches:
        bench.run(QUICK)
    assert benches[0].ir.arch == benches[1].ir.arch


def test_a_killed_puzzle_goes_on(ready: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from acc.passes.search.blockscores import BlockScores

    bench = under(ready, "tpot=0.7x")
    expected = bench.branch().run(QUICK)
    known = dict(list(expected["block_scores_nats"].items())[:10])
    ran: list[str] = []
    original = BlockScores._known

    def watched(self: BlockScores, key: str, run: Callable[[], float]) -> float:
        if not self.run:
            self.run.update(known)
        if key not in self.run:
            ran.append(key)
        return original(self, key, run)

    monkeypatch.setattr(BlockScores, "_known", watched)
    facts = bench.run(QUICK)
    assert set(ran) == set(expected["block_scores_nats"]) - set(known)
    assert facts["sizes"] == expected["sizes"]


def test_another_limit_finds_the_scores_done(ready: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from acc.passes.search.blockscores import BlockScores

    first = replace(under(ready, "tpot=0.7x"), code="same").run(QUICK)
    ran: list[str] = []
    original = BlockScores._known

    def watched(self: BlockScores, key: str, run: Callable[[], float]) -> float:
        if key not in self.run:
            ran.append(key)
        return original(self, key, run)

    monkeypatch.setattr(BlockScores, "_known", watched)
    second = replace(under(ready, "tpot=0.6x"), code="same").run(QUICK)
    assert ran == []
    assert second["block_scores_nats"] == first["block_scores_nats"]
    assert second["sizes"] != first["sizes"]


def test_nothing_fits(ready: Bench) -> None:
    with pytest.raises(NoArchFits) as caught:
        under(ready, "tpot=0.9x", "memory=0.1x").run(QUICK)
    told = str(caught.value)
    assert "ACC433" in told
    assert "no architecture keeps memory" in told
    assert "the nearest (hidden 48" in told
    assert caught.value.exit_code == 1


def test_search_without_a_limit_or_a_target(ready: Bench) -> None:
    with pytest.raises(AccError, match="ACC432"):
        under(ready).run(QUICK)
    bench = ready.branch()
    with pytest.raises(AccError, match="ACC434"):
        bench.run(QUICK)


def test_options_take_the_place_of_the_targets_limits(ready: Bench) -> None:
    bench = under(ready, "tpot=0.95x")
    facts = bench.run(replace(QUICK, tpot="0.6x"))
    assert room(bench)["tpot"] > 1 - 0.6 / 0.95
    assert facts["predicted"]["tpot"]["limit"] == pytest.approx(0.6 * facts["predicted"]["tpot"]["parent"])
    with pytest.raises(AccError, match="ACC401"):
        under(ready).run(replace(QUICK, tpot="fast"))


def test_minitron_is_uniform_and_fits(ready: Bench) -> None:
    bench = under(ready, "tpot=0.7x")
    bench.run(Order(method="absmean"))
    facts = bench.run(Minitron(tokens=512, length=64, fit=1024, compared=3, hidden=1))
    assert bench.ir.model_shape().uniform
    assert room(bench)["tpot"] >= 0.0195
    assert len(facts["compared"]) == 3
    assert facts["kl_nats"] == min(one["kl_nats"] for one in facts["compared"])


def test_layers_choose_alike_where_the_engine_wants_it(ready: Bench) -> None:
    bench = under(ready, "tpot=0.7x")
    free = grid(ffn=16, kv_group=1, q_per_kv=1, hidden=16)
    alike = {role: replace(rule, uniform=True) for role, rule in free.items()}
    bench.backend = CountingBackend(alike | {"attn": Grid("attn", 1, 1, True), "mlp": Grid("mlp", 1, 1, True)})
    bench.run(QUICK)
    assert bench.ir.model_shape().uniform
    assert room(bench)["tpot"] >= 0.0195


def test_specs_round_trip() -> None:
    for one in (
        Puzzle(tpot="0.7x", memory="6GiB", margin=0.05, data=("a.txt", "b c.txt")),
        Minitron(ttft="150ms", compared=3),
        QUICK,
        Order(method="absmean"),
    ):
        assert pipeline.parse(pipeline.format([one])) == (one,)


def _space(depth: int) -> Space:
    layer = (*(Choice(2, 2, width) for width in (96, 64, 32, 0)), Choice(0, 0, 96), Choice(0, 0, 0))
    return Space((layer,) * depth, (64,), frozenset())


def test_chosen_sum_is_the_best_that_fits(ready: Bench) -> None:
    import itertools

    parent = ready.ir.model_shape()
    space = _space(4)
    random_ = random.Random(3)
    scores = [[0.0, *sorted(random_.random() for _ in layer[1:])] for layer in space.layers]

    def score(index: int, choice: Choice) -> float:
        return scores[index][space.layers[index].index(choice)]

    limits = target("tpot=0.6x", "memory=0.75x").limits
    budget = Budget.of(CountingCosts(), WORKLOAD, parent, limits, 0.02)
    found = choose.best(budget, space, 64, score, most=2)
    every = [
        picked
        for picked in itertools.product(*space.layers)
        if sum(c.dropped for c in picked) <= 2 and budget.fits(picked, 64)
    ]
    assert found is not None
    assert sum(score(i, c) for i, c in enumerate(found)) == pytest.approx(
        min(sum(score(i, c) for i, c in enumerate(picked)) for picked in every)
    )


def test_loads_add_up_where_the_cost_model_does(ready: Bench) -> None:
    space = _space(4)
    limits = target("tpot=0.6x", "throughput=1.2x", "memory=0.75x").limits
    budget = Budget.of(CountingCosts(), WORKLOAD, ready.ir.model_shape(), limits, 0.0)
    loads = linear(budget, space, space.whole, 64)
    picked = [3, 1, 5, 4]
    costs = budget.costs([layer[at] for layer, at in zip(space.layers, picked, strict=True)], 64)
    for at, limit in enumerate(limits):
        assert loads.total(at, picked) == pytest.approx(budget.load(costs, limit.name), rel=1e-9)


def test_the_space_is_on_the_grid_and_says_what_it_means(ready: Bench) -> None:
    space = space_of(ready.ir, grid(ffn=32, hidden=16, kv_group=1, q_per_kv=1), ffn=8, heads=3, hidden=2)
    assert {choice.ffn for choice in space.layers[0]} == {96, 64, 32, 0}
    assert {choice.attention for choice in space.layers[0]} == {(2, 2), (2, 1), (1, 2), (1, 1), (0, 0)}
    assert space.hidden == (64, 48)
    parent = ready.ir.model_shape()
    for picked in zip(*space.layers, strict=True):
        shape = ready.ir.resize(sizes_of(ready.ir, picked, 48)).model_shape()
        assert shape == model_shape(parent, picked, 48)


def test_on_grid_spreads_a_few_sizes() -> None:
    from acc.ir import Dim

    dim = Dim("ffn.0", "ffn", 1536)
    assert on_grid(dim, Grid("ffn", 256, 256), 8) == [1536, 1280, 1024, 768, 512, 256]
    assert on_grid(dim, Grid("ffn", 256, 256), 2) == [1536, 1024, 256]
    assert on_grid(replace(dim, state="pinned"), Grid("ffn", 256, 256), 8) == [1536]


def test_evolution_refuses_what_only_the_scoring_tokens_like() -> None:
    space = _space(3)

    def judge(picked: tuple[Choice, ...]) -> float:
        return sum(choice.ffn for choice in picked) / 100

    ended = evolve(
        space.whole,
        space,
        fits=lambda picked: True,
        score=lambda index, choice: float(choice.ffn),
        judge=judge,
        check=lambda picked: -judge(picked),
        trials=50,
        seed=0,
        progress=silent,
    )
    assert ended.picked == space.whole
    assert ended.ended == "validation tokens got worse"
    better = evolve(
        space.whole,
        space,
        fits=lambda picked: sum(choice.ffn for choice in picked) >= 128,
        score=lambda index, choice: float(choice.ffn),
        judge=judge,
        check=judge,
        trials=50,
        seed=0,
        progress=silent,
    )
    assert better.kl < judge(space.whole)
    assert sum(choice.ffn for choice in better.picked) >= 128


def test_block_scores_are_those_of_the_changed_model(ready: Bench) -> None:
    bench = under(ready, "tpot=0.7x")
    scratch = bench.folder / "study"
    scratch.mkdir()
    from acc.passes_api import Context

    context = Context(bench.folder, scratch, "study", bench.target, None, 0, silent)
    study = Study.of(bench.ir, context, tokens=512, length=64, stride=1, fit=512, data=())
    library = study.library(64)
    for sizes in ({"ffn.2": 32}, {"attn.1": 0}, {"kv_group.0": 1}):
        index = int(next(iter(sizes)).rpartition(".")[2])
        values = library.values(sizes)
        assert study.scorer.block(index, values) == pytest.approx(study.scorer.whole(values), rel=1e-4)
        assert study.scorer.block(index, values) > 0
    assert study.scorer.without(3) == pytest.approx(study.scorer.whole({}, {3}), rel=1e-4)
    assert study.scorer.whole({}) == pytest.approx(0, abs=1e-6)
    assert study.scorer.tokens == 12 * 512
