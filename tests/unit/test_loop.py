"""The arithmetic of the closed loop: what a measurement that broke a limit makes of the limit searched for next."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from passes_for_tests import Note, Options, Read, registered, tiny_ir

from acc import pipeline
from acc.backend_api import EngineInfo, Measured
from acc.bundle import output
from acc.compile import Compilation, Request, Turn, adapt, runnable, until
from acc.cost import Costs, Figure
from acc.diag import AccError
from acc.manager import Run
from acc.target import Device, Limit, Target, Workload

ENGINE = EngineInfo("llamacpp", "wheel", "1", "", "", ())
HALF = Limit("tpot", 0.5, relative=True)
TARGET = Target("test", Device("desk", "gpu", 2**30, 1e9, {}, "made up"), "none", Workload("short", 128, 64), (HALF,))


def _measured(tpot: float) -> Measured:
    return Measured(0.1, tpot, 1 / tpot, 2**20, {}, ENGINE)


def _predicted(tpot: float) -> Costs:
    memory = Figure(2**20, "B", "interpolated")
    return Costs(
        Figure(0.1, "s", "interpolated"),
        Figure(tpot, "s", "interpolated"),
        Figure(1 / tpot, "tok/s", "interpolated"),
        memory,
    )


def _turn(predicted: tuple[float, float], measured: tuple[float, float] | None, *limits: Limit) -> Turn:
    both = (_measured(measured[0]), _measured(measured[1])) if measured else None
    return Turn(Run(tiny_ir(), ()), limits, (_predicted(predicted[0]), _predicted(predicted[1])), both)


def _compilation(*limits: Limit) -> Compilation:
    target = dataclasses.replace(TARGET, limits=limits)
    nothing: Any = None
    return Compilation(Request("model", target, (), Path("out"), "acc"), nothing, nothing, nothing, ())


def test_a_relative_limit_is_corrected_by_the_ratio_of_ratios() -> None:
    turn = _turn((0.010, 0.005), (0.010, 0.006), HALF)  # predicted 0.5 of the parent, measured 0.6
    assert turn.excess(HALF) == pytest.approx(0.2)
    corrected = _compilation(HALF).corrected(HALF, turn)
    assert corrected.relative
    assert corrected.value == pytest.approx(0.5 * 0.5 / 0.6)


def test_an_error_that_parent_and_child_share_corrects_nothing_more_than_the_least() -> None:
    turn = _turn((0.010, 0.00502), (0.020, 0.01004), HALF)  # twice as slow as predicted, both
    assert _compilation(HALF).corrected(HALF, turn).value == pytest.approx(0.5 * 0.98)


def test_an_absolute_limit_is_corrected_by_the_figures_and_throughput_upwards() -> None:
    tpot, floor = Limit("tpot", 0.005), Limit("throughput", 200)
    turn = _turn((0.010, 0.005), (0.010, 0.006), tpot, floor)
    assert _compilation(tpot, floor).corrected(tpot, turn).value == pytest.approx(0.005 * 5 / 6)
    assert _compilation(tpot, floor).corrected(floor, turn).value == pytest.approx(200 * 6 / 5)


def test_corrections_only_get_tighter_and_kept_limits_stay() -> None:
    used, memory = Limit("tpot", 0.3, relative=True), Limit("memory", 2**21)
    turn = _turn((0.010, 0.003), (0.010, 0.0051), used, memory)
    loop = _compilation(HALF, memory)
    assert loop.corrected(HALF, turn).value == pytest.approx(0.3 * 0.98)  # 0.5 x 3 / 5.1 is 0.294 too
    assert loop.corrected(memory, turn) == memory


def test_nothing_was_measured_so_nothing_is_missed() -> None:
    assert _turn((0.010, 0.009), None, HALF).excess(HALF) == 0


def test_passes_are_fitted_to_the_request(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("calibrate me")
    with registered():
        passes = pipeline.parse("calibrate,note,read,bench,quantize")
        given = adapt(passes, [text], True)
        assert pipeline.format(given) == (f"calibrate{{data=[{text}]}},note,read,bench,quantize{{allow-fallback=true}}")
        with pytest.raises(AccError, match="ACC333"):
            adapt(passes, [tmp_path / "gone"], False)
        assert [one.name for one in runnable(passes, TARGET)] == ["calibrate", "note", "read", "quantize"]
    assert until([Note(), Read(), Note(), Options()], "note") == (Note(), Read(), Note())


def test_an_old_bundle_stands_until_the_new_one_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with output(out) as fresh:
        (fresh / "arch.json").write_text('{"acc": "1"}')
    with pytest.raises(ZeroDivisionError), output(out) as fresh:
        (fresh / "half").write_text(str(1 / 0))
    assert [path.name for path in out.iterdir()] == ["arch.json"]
    with output(out) as fresh:
        (fresh / "arch.json").write_text('{"acc": "2"}')
    assert (out / "arch.json").read_text() == '{"acc": "2"}'
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
