"""The cost model of llama.cpp against llama.cpp: work and memory of shapes, profiles, resuming, misfitting tables."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_files import cpu_target
from transformers import AutoConfig

from acc.backends.llamacpp import LlamaCpp
from acc.backends.llamacpp.cost import cost_model
from acc.backends.llamacpp.measure import Job, Record, Schedule, Visit, open_prompts, run, settled, timing
from acc.backends.llamacpp.memory import memory
from acc.backends.llamacpp.options import options_for
from acc.backends.llamacpp.probes import probe_formats, weights, write_probe
from acc.backends.llamacpp.profile import design, profile
from acc.backends.llamacpp.types import MIXES
from acc.backends.llamacpp.work import Family, decode_work, prefill_work
from acc.backends.llamacpp.writer import draft
from acc.cost import CostTable
from acc.diag import AccError
from acc.ir import ModelIR
from acc.passes_api import Context
from acc.target import Target, Workload
from acc.trace import trace

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 2048,
}
UNEVEN = {"hidden": 192, "ffn.0": 256, "kv_group.1": 2, "q_per_kv.2": 1, "attn.0": 0, "mlp.3": 0, "layer.2": 0}


def traced(family: str, **changes: object) -> ModelIR:
    return trace(AutoConfig.for_model(family, **{**SIZES, "tie_word_embeddings": True, **changes}))


@pytest.fixture(scope="module")
def llama() -> ModelIR:
    return traced("llama")


def context(folder: Path, target: Target) -> Context:
    folder.mkdir(parents=True, exist_ok=True)
    return Context(folder.parent, folder, folder.name, target, LlamaCpp(), 0, lambda step, total, what="": None)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "granite", "phi3"])
def test_a_body_holds_the_tensors_of_the_file(family: str) -> None:
    ir = traced(family, **({"pad_token_id": 0} if family == "phi3" else {}))
    shapes = [{}, {"layer.1": 0}] if family == "phi3" else [{}, {"layer.1": 0}, UNEVEN]
    for sizes, quant in itertools.product(shapes, ("q4_k_m", "q8_0", "f16")):
        cut = ir.resize(sizes)
        made = draft(cut, quant, None)
        body = Family(ir).body(cut.model_shape(), quant)
        assert sorted((t.shape, t.type, t.bytes) for t in body.tensors) == sorted(
            (t.shape, t.type, t.bytes) for t in made.tensors
        )
        assert body.host.arch == made.choice.host.arch
        assert body.held == made.choice.held.model_shape()


def test_work_grows_with_what_makes_it(llama: ModelIR) -> None:
    family = Family(llama)
    whole = family.body(llama.model_shape(), "q8_0")
    cut = family.body(llama.resize({"ffn.1": 256}).model_shape(), "q8_0")
    saved = 3 * 256 * 256
    assert decode_work(whole, 9)["read.Q8_0"] - decode_work(cut, 9)["read.Q8_0"] == saved * 34 / 32
    assert prefill_work(whole, 10, 512)["multiply.Q8_0"] - prefill_work(cut, 10, 512)["multiply.Q8_0"] == 10 * saved
    assert decode_work(whole, 200)["cache"] == 2 * decode_work(whole, 100)["cache"] == 200 * 4 * 8 * 32
    # Eight heads keep three threads as busy as nine; a long request is split by its cells, of which 128 are unused.
    assert decode_work(whole, 100, threads=3)["cache"] == 100 * 4 * 9 * 32
    assert decode_work(whole, 384, threads=2)["cache"] == 2 * 256 * 4 * 8 * 32
    assert decode_work(whole, 384, 2, threads=2)["cache"] == 2 * decode_work(whole, 384)["cache"]
    assert decode_work(whole, 0, 1, whole.weight_bytes + 1)["spill"] == 0
    assert decode_work(whole, 0, 1, 1000)["spill"] == decode_work(whole, 0)["read.Q8_0"] - 1000
    # Two graphs: the first sees its own tokens, the second all.
    assert prefill_work(whole, 768, 512)["scores"] == 4 * 8 * 32 * (512 * 512 + 256 * 768)


def test_every_format_that_acc_writes_can_be_probed() -> None:
    import numpy as np
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    kinds = {mix.base for mix in MIXES.values()} | {"Q5_0", "Q5_1", "Q4_0", "Q6_K", "Q5_K"}
    assert kinds <= probe_formats()
    for kind in sorted(kinds - {"F16"}):
        values = dequantize(weights(kind, (8, 512)), GGMLQuantizationType[kind])
        assert values.shape == (8, 512)
        assert np.isfinite(values).all()
        assert 0.01 < values.std() < 0.04


@pytest.mark.parametrize(
    ("sizes", "quant", "held", "batch", "options"),
    [
        ({}, "q8_0", 512, 1, {}),
        (UNEVEN, "q4_k_m", 300, 1, {}),
        (UNEVEN, "q8_0", 512, 2, {"type_k": "q8_0", "type_v": "q8_0", "flash_attn": "on"}),
        ({"ffn.2": 256}, "f16", 1024, 1, {"n_ubatch": 128}),
    ],
)
def test_memory_is_what_the_engine_reports(
    tmp_path: Path, sizes: dict[str, int], quant: str, held: int, batch: int, options: dict[str, Any]
) -> None:
    ir = traced("llama", vocab_size=16384)
    cut = ir.resize(sizes)
    target = cpu_target(**options)
    file = tmp_path / "probe.gguf"
    write_probe(cut, quant, file)
    with LlamaCpp().open(file, target, context=held, batch=batch) as session:
        reported = session.memory()
    predicted = memory(Family(ir).body(cut.model_shape(), quant), options_for(target, context=held, batch=batch))
    assert predicted.weights == reported["weights"]
    assert predicted.kv == pytest.approx(reported["kv"], abs=0.01 * 2**20)  # the log is rounded so
    assert predicted.total == pytest.approx(reported["total"], rel=0.03)


def test_a_profile_predicts_what_it_measured(llama: ModelIR, tmp_path: Path) -> None:
    target = dataclasses.replace(cpu_target(Workload("test", 64, 16)), quant="q8_0")
    artifact = profile(llama, target, context(tmp_path / "key", target))
    table = CostTable.load(tmp_path / artifact.path)
    assert table.provenance.engine_version
    assert {sample.shape for sample in table.samples} == {
        one.model_shape() for one in design(llama, target, 0).values()
    }
    costs = cost_model(tmp_path / artifact.path, llama, target).predict(llama.model_shape(), target.workload)
    assert costs.tpot.source == "interpolated"
    parent = [s for s in table.select("q8_0", "decode") if s.shape == llama.model_shape()]
    assert min(s.seconds for s in parent) / 3 < costs.tpot.value < 3 * max(s.seconds for s in parent)
    half = llama.resize({f"ffn.{layer}": 128 for layer in range(4)} | {"hidden": 128, "layer.1": 0})
    less = cost_model(tmp_path / artifact.path, llama, target).predict(half.model_shape(), target.workload)
    assert less.ttft.value < costs.ttft.value
    assert less.memory.value < costs.memory.value
    assert not list((tmp_path / "key").glob("*.gguf"))

    other = dataclasses.replace(target, quant="q4_k_m")
    with pytest.raises(AccError, match=r"ACC602.*no prefill samples at q4_k_m \(it holds q8_0\)"):
        cost_model(tmp_path / artifact.path, llama, other)
    elsewhere = dataclasses.replace(target, device=dataclasses.replace(target.device, name="another"))
    with pytest.raises(AccError, match=r"ACC602.*of the device `here`, and the target needs `another`"):
        cost_model(tmp_path / artifact.path, llama, elsewhere)


def test_a_validation_judges_architectures_that_no_fit_has_seen(llama: ModelIR, tmp_path: Path) -> None:
    target = dataclasses.replace(cpu_target(Workload("test", 32, 16)), quant="q8_0")
    table, found = LlamaCpp().validate(llama, target, context(tmp_path / "key", target), None, 3)
    assert len({row.described for row in found.rows}) == 3
    assert len({sample.shape for sample in table.samples}) == 12
    assert max(abs(row.error("memory")) for row in found.rows) < 0.1  # of a model of two megabytes
    assert all(row.measured["ttft"] > row.measured["tpot"] > 0 for row in found.rows)
    again, judged = LlamaCpp().validate(llama, target, context(tmp_path / "other", target), table, 2)
    assert again == table
    assert [row.predicted for row in judged.rows] == [row.predicted for row in found.rows[:2]]


def test_visits_survive_a_kill(llama: ModelIR, tmp_path: Path) -> None:
    target = dataclasses.replace(cpu_target(), quant="q8_0")
    schedule = Schedule((16,), steps=3, rounds=2, most_rounds=2)
    jobs = {"parent": Job(llama, schedule), "less": Job(llama.resize({"ffn.1": 256}), schedule)}
    file = tmp_path / "visits.jsonl"
    record = Record(file, "a plan")
    with pytest.raises(KeyboardInterrupt):
        run(jobs, target, record, _interrupt_at(3))
    with file.open("a") as torn:
        torn.write('{"model": "less", "rou')  # the line that a kill cut short
    kept = Record(file, "a plan")
    assert len(kept.visits) == 3
    run(jobs, target, kept, lambda step, total, what: None)
    assert kept.visits[:3] == record.visits
    assert sorted((v.model, v.round) for v in kept.visits) == [(m, r) for m in ("less", "parent") for r in (0, 1)]
    assert Record(file, "a plan").visits == kept.visits
    assert Record(file, "another plan").visits == []


def _interrupt_at(count: int) -> Callable[[int, int, str], None]:
    def note(step: int, total: int, what: str) -> None:
        if step == count:
            raise KeyboardInterrupt

    return note


def visit(number: int, first: float, step: float) -> Visit:
    return Visit("m", number, {"16": first}, {"16": step}, 0.0)


def test_a_model_is_visited_until_its_medians_are_known() -> None:
    steady = [visit(number, 1.0 + number / 100, 0.1) for number in range(5)]
    assert not settled(steady[:1], 16)
    assert settled(steady, 16)
    uneven = [visit(number, 1.0, 0.1 + 0.01 * (number % 3)) for number in range(3)]  # a spread of 4.5 %
    assert not settled(uneven, 16)
    assert settled([visit(number, 1.0, 0.1 + 0.01 * (number % 3)) for number in range(48)], 16)


def test_only_prompts_that_are_not_settled_are_timed_again() -> None:
    schedule = Schedule((16, 64), rounds=2)
    both = [Visit("m", i, {"16": 1.0, "64": 1.0 + i}, {"16": 1.0, "64": 1.0}, 0.0) for i in (0, 1)]
    assert open_prompts(both[:1], 1, schedule) == (16, 64)
    assert open_prompts(both, 1, schedule) == ()
    assert open_prompts(both, 2, schedule) == (64,)
    found = timing([*both, Visit("m", 2, {"64": 1.01}, {"64": 0.99}, 0.0)], schedule.prompts)
    assert (found.first[16], found.first[64], found.step[64]) == (1.0, 1.01, 1.0)


def test_the_median_visit_counts_as_the_median_round_does_in_a_bench() -> None:
    found = timing([visit(0, 1.0, 0.1), visit(1, 0.5, 0.3), visit(2, 0.6, 0.2)], [16])
    assert (found.first[16], found.step[16]) == (0.6, 0.2)
    assert found.step_spread[16] == pytest.approx(0.25)  # half of 0.25 - 0.15, over the median


def test_probe_weights_have_no_mean() -> None:
    """With a mean, scores grow until exponentials underflow, and a probe takes longer than any real model."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    for kind in sorted(probe_formats() - {"F32", "F16", "BF16"}):
        values = dequantize(weights(kind, (64, 512)), GGMLQuantizationType[kind])
        assert abs(values.mean()) < 0.15 * values.std(), kind


def test_a_device_that_is_not_here_is_estimated_and_says_so(llama: ModelIR) -> None:
    target = cpu_target(Workload("npc", 512, 64))
    flops = {"f16": 60e12}
    device = dataclasses.replace(target.device, name="gpu", kind="gpu", bandwidth=600e9, flops=flops, here=False)
    slow = dataclasses.replace(target, device=device)
    fast = dataclasses.replace(slow, device=dataclasses.replace(device, bandwidth=1200e9, flops={"f16": 120e12}))
    costs = [cost_model(None, llama, one).predict(llama.model_shape(), one.workload) for one in (slow, fast)]
    assert {costs[0].ttft.source, costs[0].tpot.source, costs[0].memory.source} == {"estimated"}
    assert "data sheet" in costs[0].tpot.note
    assert costs[1].tpot.value < costs[0].tpot.value
    assert costs[0].tpot.error >= 0.3
    assert json.dumps(costs[0].memory.value)
