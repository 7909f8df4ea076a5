"""Quantities, limits and target files: what is read, and the exact words of what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acc import machine, targetfiles
from acc.diag import AccError
from acc.quantity import quantity, written
from acc.target import LIMIT_UNITS, Device, Limit, LimitName, Target, Workload, check_limits


@pytest.mark.parametrize(
    ("name", "text", "value", "relative"),
    [
        ("tpot", "8ms", 0.008, False),
        ("tpot", " 8 ms ", 0.008, False),
        ("ttft", ".15s", 0.15, False),
        ("ttft", "150us", 150e-6, False),
        ("memory", "6GiB", 6 * 2**30, False),
        ("memory", "6GB", 6e9, False),
        ("memory", "512MiB", 2**29, False),
        ("throughput", "900tok/s", 900, False),
        ("tpot", "0.7x", 0.7, True),
        ("throughput", "2x", 2, True),
    ],
)
def test_limits_as_people_write_them(name: LimitName, text: str, value: float, relative: bool) -> None:
    limit = Limit.parse(name, text)
    assert limit.value == pytest.approx(value)
    assert limit.relative is relative


WRONG = {
    ("tpot", "8"): """\
error[ACC401]: --tpot: `8` has no unit

hint: write it like `8ms` or `0.7x` (of the parent); units: ns, us, µs, ms, s, min""",
    ("tpot", "6GiB"): """\
error[ACC401]: --tpot: cannot read `6GiB`

hint: write it like `8ms` or `0.7x` (of the parent); units: ns, us, µs, ms, s, min""",
    ("memory", "lots"): """\
error[ACC401]: --memory: cannot read `lots`

hint: write it like `6GiB` or `0.7x` (of the parent); units: B, kB, MB, GB, TB, KiB, MiB, GiB, TiB""",
    ("tpot", "0ms"): """\
error[ACC402]: --tpot: `0ms` is not more than zero

hint: nothing can keep such a limit""",
    ("throughput", "-3tok/s"): """\
error[ACC402]: --throughput: `-3tok/s` is not more than zero

hint: nothing can keep such a limit""",
    ("tpot", "1e999ms"): """\
error[ACC402]: --tpot: `1e999ms` is not a finite number above zero

hint: nothing can keep such a limit""",
}


@pytest.mark.parametrize(("name", "text"), list(WRONG))
def test_wrong_quantities(name: LimitName, text: str) -> None:
    with pytest.raises(AccError) as caught:
        Limit.parse(name, text)
    assert str(caught.value) == WRONG[name, text]


@given(st.sampled_from(["s", "B", "tok/s", "B/s", "FLOP/s"]), st.floats(1e-9, 1e15))
def test_what_is_written_reads_back_to_three_digits(unit: str, value: float) -> None:
    read, _ = quantity(written(value, unit), unit, "test") if value >= 1 or unit == "s" else (value, False)
    assert read == pytest.approx(value, rel=0.006)


def _target(*limits: tuple[LimitName, str], output: int = 64) -> Target:
    device = Device("small", "gpu", 2**30, 1e9, {}, "made up")
    parsed = tuple(Limit.parse(name, text) for name, text in limits)
    return Target("test", device, "llamacpp", Workload("short", 128, output), parsed)


def test_contradictory_limits_are_told_all_at_once() -> None:
    with pytest.raises(AccError) as caught:
        check_limits(_target(("memory", "6GiB"), ("tpot", "8ms"), output=1))
    assert (
        str(caught.value)
        == """\
error[ACC403]: --memory: allows 6 GiB, but small has only 1 GiB

hint: lower the limit or choose another device
error[ACC403]: --tpot: limits the time per token after the first, but workload short has one output token

hint: limit --ttft, or choose another workload"""
    )


def test_limits_that_the_parent_keeps_ask_for_nothing() -> None:
    with pytest.raises(AccError) as caught:
        check_limits(_target(("tpot", "1.2x"), ("throughput", "0.5x")))
    assert (
        str(caught.value)
        == """\
error[ACC403]: limits: the parent itself keeps --tpot 1.2x, --throughput 0.5x, so nothing is left to do

hint: write less than 1x (more than 1x for --throughput)"""
    )
    check_limits(_target(("tpot", "1.2x"), ("memory", "0.5x")))  # no slower than that, but smaller: a fair wish


def test_no_limit_at_all() -> None:
    with pytest.raises(AccError, match=r"ACC404.*no limit is given, so there is nothing to compile for"):
        check_limits(_target())


def test_limits_resolve_and_tell_how_far_they_are_broken() -> None:
    half = Limit("tpot", 0.5, relative=True)
    assert half.resolve(0.010).violation(0.006) == pytest.approx(0.2)
    assert Limit("throughput", 100).violation(80) == pytest.approx(0.2)
    assert Limit("throughput", 100).violation(120) < 0
    replaced = _target(("tpot", "8ms"), ("memory", "0.5GiB")).with_limits([half])
    assert replaced.limit("tpot") == half
    assert str(replaced.limit("memory")) == "512 MiB"


# Target files --------------------------------------------------------------------------------------------------------


def _load(name: str, folder: Path, **changes: Any) -> Target:
    return targetfiles.load(name, cache_file=folder / "machine.json", **changes)


def test_this_machine_is_detected_and_stays_the_same(tmp_path: Path) -> None:
    one, two = _load("cpu-llamacpp", tmp_path), _load("cpu-llamacpp", tmp_path)
    assert one == two  # measured once: a target that changed would lose every stored result
    assert one.device.here
    assert one.device.threads == machine.threads() >= 1
    assert 1e9 < one.device.bandwidth < 2e12
    assert 1e9 < one.device.flops["f32"] < 1e14
    assert one.device.memory_bytes == machine.memory_bytes() > 2**28


def test_a_device_from_its_data_sheet_names_its_source(tmp_path: Path) -> None:
    device = _load("rtx5070-llamacpp", tmp_path).device
    assert (device.memory_bytes, device.bandwidth) == (12 * 2**30, 672e9)
    assert "672 GB/s" in device.source
    assert not device.here


def test_every_installed_target_loads(tmp_path: Path) -> None:
    assert targetfiles.faults() == []
    for name in targetfiles.installed().target:
        for workload in targetfiles.installed().workload:
            found = _load(name, tmp_path, workload=workload)
            assert found.workload.held == (found.workload.context or found.workload.prompt + found.workload.output)


OWN = """
[device.board]
kind = "cpu"
memory = "8GB"
bandwidth = "17GB/s"
source = "the board's manual"
[target.mine]
device = "board"
engine = "llamacpp"
workload = "npc"
limits = { tpot = "50ms", memory = "0.5x" }
options = { threads = 4 }
"""


def test_a_users_own_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(OWN)
    found = _load(str(file), tmp_path, quant="q8_0")
    assert found == _load(f"{file}:mine", tmp_path, quant="q8_0")
    assert (found.device.bandwidth, found.workload.prompt, found.quant) == (17e9, 512, "q8_0")
    assert found.limits == (Limit("tpot", 0.05), Limit("memory", 0.5, relative=True))
    assert found.engine_options == {"threads": 4}
    assert set(dataclasses.asdict(found.workload)) == {"name", "prompt", "output", "batch", "context"}


BAD_FILES = {
    'limits = { tpt = "5ms" }': "unknown key `target.mine.limits.tpt`\n\nhint: did you mean `tpot` or `ttft`?",
    'limits = { tpot = "5" }': "target mine: tpot: `5` has no unit",
    "quantt = 3": "unknown key `target.mine.quantt`\n\nhint: did you mean `quant`?",
    "quant = 3": "`target.mine.quant`: input should be a valid string",
    "quant = ": "is not TOML: ",
}


@pytest.mark.parametrize("line", list(BAD_FILES))
def test_faults_of_a_users_file_name_the_key(tmp_path: Path, line: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'[target.mine]\ndevice = "cpu"\nengine = "llamacpp"\nworkload = "short"\n{line}\n')
    with pytest.raises(AccError) as caught:
        _load(str(file), tmp_path)
    assert BAD_FILES[line] in str(caught.value)


def test_unknown_names_suggest(tmp_path: Path) -> None:
    for name, workload, text in [
        ("cpu-lamacpp", None, "error[ACC301]: cpu-lamacpp: unknown target\n\nhint: did you mean `cpu-llamacpp`"),
        ("cpu-llamacpp", "ncp", "error[ACC301]: ncp: unknown workload\n\nhint: did you mean `npc`?"),
    ]:
        with pytest.raises(AccError) as caught:
            _load(name, tmp_path, workload=workload)
        assert str(caught.value).startswith(text)


def test_a_file_that_is_not_there_or_holds_several(tmp_path: Path) -> None:
    with pytest.raises(AccError, match=r"ACC410.*cannot be read"):
        _load(str(tmp_path / "gone.toml"), tmp_path)
    both = tmp_path / "two.toml"
    both.write_text(OWN + OWN.replace("board]", "board2]").replace("target.mine", "target.other"))
    with pytest.raises(AccError, match=r"defines 2 targets \(mine, other\)\n\nhint: write `.*two.toml:NAME`"):
        _load(str(both), tmp_path)


@pytest.mark.parametrize(
    ("names", "here"),
    [
        (("NVIDIA GeForce RTX 5070",), True),
        (("NVIDIA GeForce RTX 5070 Ti",), False),
        (("NVIDIA GeForce RTX 5070 Laptop GPU",), False),
        (("NVIDIA H200", "NVIDIA GeForce RTX 5070"), True),
        ((), False),
    ],
)
def test_whether_a_gpu_is_here(monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], here: bool) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: names)
    assert targetfiles.is_here(targetfiles.installed().device["rtx5070"]) is here


def test_the_units_of_limits_cover_every_limit() -> None:
    assert set(targetfiles.LimitTable.model_fields) == set(LIMIT_UNITS)
