"""Cost tables, the fit of rates, and what a validation says."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from acc.cost import CostTable, Kind, MemorySample, Provenance, Sample, Validation
from acc.costfit import Work, choose, fit
from acc.diag import AccError
from acc.ir import LayerShape, ModelShape
from acc.validation import COSTS, Comparison, ValidationResult, markdown

RATES = {"read": 2e-10, "blocks": 3e-5, "calls": 1e-3}


def work(rng: random.Random) -> Work:
    return {"read": rng.uniform(1e6, 1e8), "blocks": rng.randint(4, 60), "calls": 1}


def seconds(amounts: Work) -> float:
    return sum(RATES[name] * amount for name, amount in amounts.items())


def shape(depth: int = 3, ffn: int = 512) -> ModelShape:
    return ModelShape(256, 1024, 64, tuple(LayerShape(4, 2, ffn) for _ in range(depth)), True)


def table() -> CostTable:
    made = Provenance("a cpu", "llamacpp", "1", "AVX2", 2, "2026-12-01T00:00:00+00:00", 0.01, 30.0, {"ubatch": 512})
    kinds: tuple[tuple[Kind, int], ...] = (("prefill", 128), ("decode", 1))
    samples = [
        Sample(shape(ffn=ffn), "q8_0", kind, tokens, 128, 1e-3 * ffn, 0.01)
        for ffn in (256, 512)
        for kind, tokens in kinds
    ]
    memory = MemorySample(shape(ffn=256), "q8_0", 512, 1, {"weights": 10, "total": 20})
    return CostTable(made, "llama", tuple(samples), (memory,), Validation(10, {"tpot": 0.02}, {"tpot": 0.04}, "2026"))


def test_the_fit_recovers_the_rates_that_samples_were_made_with() -> None:
    rng = random.Random(0)
    works = [work(rng) for _ in range(20)]
    found = fit(works, [seconds(one) for one in works], list(range(20)), ridge=0.0)
    assert found.seconds == pytest.approx(RATES, rel=1e-6)
    assert found.error < 1e-6
    assert found.residual < 1e-6


def test_the_fit_survives_noise_and_tells_it() -> None:
    rng = random.Random(1)
    works = [work(rng) for _ in range(30)]
    measured = [seconds(one) * rng.gauss(1, 0.03) for one in works]
    found = fit(works, measured, list(range(30)))
    new = [work(rng) for _ in range(50)]
    errors = sorted(abs(found.predict(one) / seconds(one) - 1) for one in new)
    assert errors[45] < 0.05
    assert 0.02 < found.error < 0.1


def test_a_disturbed_sample_does_not_pull_at_the_others() -> None:
    rng = random.Random(2)
    works = [work(rng) for _ in range(20)]
    measured = [seconds(one) for one in works]
    measured[3] *= 2
    found = fit(works, measured, list(range(20)), ridge=0.0)
    assert found.seconds == pytest.approx(RATES, rel=0.01)


def test_no_rate_is_negative_and_unknown_work_is_named() -> None:
    works: list[Work] = [{"a": 1, "b": 2}, {"a": 2, "b": 1}, {"a": 3, "b": 3}]
    found = fit(works, [1.0, 4.0, 5.0], [0, 1, 2])  # least squares alone would make b cheaper than nothing
    assert min(found.seconds.values()) >= 0
    assert found.unknown({"a": 1, "c": 1}) == ("c",)


def test_probes_are_chosen_that_tell_classes_apart() -> None:
    alike: list[list[Work]] = [[{"a": 10 + i, "b": 10 + i}] for i in range(8)]
    apart: list[list[Work]] = [[{"a": 20, "b": 1}], [{"a": 1, "b": 20}]]
    assert set(choose([*alike, *apart], 3)) == {0, 8, 9}


def test_a_table_reads_back_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    table().save(file)
    assert CostTable.load(file) == table()
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]
    assert max(len(line) for line in file.read_text().splitlines()) < 300  # one record a line: for people


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda data: data.pop("samples"), "samples"),
        (lambda data: data["samples"][0].update(seconds=-1.0), "greater than 0"),
        (lambda data: data["samples"][0].update(seconds="NaN"), "seconds"),
        (lambda data: data["samples"][0].update(shape=99), "shape 99"),
        (lambda data: data["shapes"][0].update(hidden=1 << 40), "hidden"),
        (lambda data: data.update(format="another"), "format"),
        (lambda data: data.update(surprise=1), "surprise"),
    ],
)
def test_a_bad_table_is_refused(tmp_path: Path, change: object, told: str) -> None:
    file = tmp_path / "table.json"
    table().save(file)
    data = json.loads(file.read_text())
    change(data)  # type: ignore[operator]
    file.write_text(json.dumps(data))
    with pytest.raises(AccError) as raised:
        CostTable.load(file)
    (diagnostic,) = raised.value.diagnostics
    assert diagnostic.code == "ACC601"
    assert told in diagnostic.message
    assert "acc profile" in diagnostic.hint


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"[" * 100_000, b'{"format": '])
def test_what_is_no_json_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "table.json"
    file.write_bytes(content)
    with pytest.raises(AccError, match="ACC601"):
        CostTable.load(file)
    with pytest.raises(AccError, match="No such file"):
        CostTable.load(tmp_path / "absent.json")


def test_validation_tells_errors_with_their_sign_and_the_rank() -> None:
    rows = [
        Comparison(
            str(i),
            "",
            {"ttft": t, "tpot": p, "memory": 1.0},
            {"ttft": 1.0 + i, "tpot": 1.0, "memory": 1.0},
            dict.fromkeys(COSTS, 0.0),
        )
        for i, (t, p) in enumerate([(1.1, 0.9), (2.0, 1.0), (2.7, 1.1), (4.0, 1.3)])
    ]
    result = ValidationResult(tuple(rows), "2026-12-01")
    assert rows[0].error("ttft") == pytest.approx(0.1)
    assert rows[2].error("ttft") == pytest.approx(-0.1)
    assert result.summary("ttft").rank == pytest.approx(1.0)
    assert result.summary("tpot").worst == pytest.approx(0.3)
    assert result.summary("tpot").median == pytest.approx(0.1)
    assert result.validation().p90["memory"] == 0.0
    assert "-10.0%" in markdown(result.to_json())
    assert replace(result, rows=()).rows == ()


def test_a_table_from_elsewhere_stands_in_for_a_measurement(tmp_path: Path) -> None:
    from on_tiny import CountingBackend, grid, target
    from passes_for_tests import tiny_ir

    from acc.passes.analysis.profile import Profile
    from acc.passes_api import Context

    given, scratch = tmp_path / "given.json", tmp_path / "scratch"
    table().save(given)
    scratch.mkdir()
    backend: Any = CountingBackend(grid())
    ctx = Context(tmp_path, scratch, "key", target(), backend, 0, lambda *_: None)
    done = Profile(table=str(given)).run(tiny_ir(), ctx)
    assert done.facts["origin"] == "given"
    assert done.ir.artifacts["table"].path == "key/table.json"  # where the store puts what lies in `scratch`
    assert CostTable.load(scratch / "table.json") == table()
