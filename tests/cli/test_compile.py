"""Compiles of a tiny model in the real engine: bundles, resume, limits that nothing keeps, disks and rivals."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command import Acc

pytest.importorskip("xllamacpp", reason="needs an engine: pip install xllamacpp")

ORDER = "calibrate{tokens=512,length=64},order{method=actnorm}"
PASSES = f"{ORDER},uniform{{ffn=256}},slice,lower-hf,lower-gguf,quantize,verify{{samples=1,length=64}}"
MEASURED = f"{PASSES},bench"
TARGETS = """
[workload.tiny]
prompt = 32
output = 8

[target.here]
device = "cpu"
engine = "llamacpp"
workload = "tiny"
quant = "q8_0"
options = { threads = 1 }  # two would wait for each other where the machine has other work

[target.elsewhere]
device = "rtx5070"
engine = "llamacpp"
workload = "tiny"
quant = "q8_0"
options = { threads = 1 }
"""


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama", hidden_size=256, intermediate_size=512, head_dim=64, initializer_range=0.05)


@pytest.fixture(scope="module")
def shared(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Acc:
    """One store for this module: later tests start from the results of earlier ones."""
    return Acc(site, tmp_path_factory.mktemp("shared") / "store")


def _compile(
    model: Path, out: Path, *more: str, passes: str = MEASURED, target: str = "here"
) -> tuple[str | Path, ...]:
    targets = model / "targets.toml"
    targets.write_text(TARGETS)
    return ("compile", model, "-t", f"{targets}:{target}", "--memory", "0.9x", "-p", passes, "-o", out, *more)


@pytest.fixture(scope="module")
def bundle(shared: Acc, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bundle") / "out"
    printed, told = shared(*_compile(model, out))
    assert told.startswith(f"pipeline: {MEASURED}\n")
    assert "every limit kept, as measured" in printed
    return out


def test_a_bundle_is_whole_and_nothing_else_is_left(bundle: Path) -> None:
    names = sorted(path.name for path in bundle.iterdir())
    assert names == ["arch.json", "hf", "ir.json", "model.gguf", "report.html", "report.json", "run.md"]
    assert [path.name for path in bundle.parent.iterdir()] == ["out"]
    report = json.loads((bundle / "report.json").read_text())
    assert report["child"]["measured"]["memory"] < 0.9 * report["parent"]["measured"]["memory"]
    assert len(report["child"]["measured"]["rounds"]["tpot"]) >= 5
    assert report["child"]["file_bytes"] == (bundle / "model.gguf").stat().st_size == report["child"]["planned_bytes"]
    assert [stage["name"] for stage in report["stages"]][:3] == ["trace", "calibrate", "order"]
    arch = json.loads((bundle / "arch.json").read_text())
    assert [layer["ffn"] for layer in arch["shape"]["layers"]] == [256] * 4


def test_the_same_command_again_runs_only_the_bench(shared: Acc, model: Path, bundle: Path) -> None:
    before = (bundle / "model.gguf").stat().st_ino
    _, told = shared(*_compile(model, bundle))
    stages = [line for line in told.splitlines() if line.startswith("[")]
    assert [line for line in stages if not line.endswith("from the store")] == [stages[-1]]
    assert " bench " in stages[-1]
    assert (bundle / "model.gguf").stat().st_ino != before  # replaced as a whole


def test_a_bundle_answers_and_is_measured_again(shared: Acc, model: Path, bundle: Path) -> None:
    assert shared("run", bundle, "Hello", "-n", "4")[0].strip()
    facts = json.loads(shared("bench", bundle, "--against", model, "--json")[0])
    assert facts["child"]["memory"] < facts["parent"]["memory"]
    assert len(facts["child"]["rounds"]["tpot"]) >= 5
    assert "ratio" in shared("bench", bundle)[0]


def test_limits_that_nothing_keeps_end_with_1(shared: Acc, model: Path, tmp_path: Path) -> None:
    printed, told = shared(*_compile(model, tmp_path / "out", "--memory", "0.1x"), code=1)
    assert printed == ""
    assert "error[ACC420]: here: after 2 searches no architecture keeps memory 0.1x as measured" in told
    assert "the nearest (hidden 256, 4 layers, FFN 256 to 256, " in told
    assert "hint: loosen --memory" in told
    assert not list(tmp_path.glob("out*"))
    assert not list(tmp_path.glob(".out*"))


def test_a_device_that_is_elsewhere_is_estimated(shared: Acc, model: Path, tmp_path: Path) -> None:
    printed, told = shared(*_compile(model, tmp_path / "out", "--f16", target="elsewhere"))
    assert "rtx5070 is not here: bench left out, every cost is estimated" in told
    assert "est." in printed
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["child"]["measured"] is None
    sources = {report["child"]["predicted"][name]["source"] for name in ("ttft", "tpot", "throughput")}
    assert sources == {"estimated"}
    assert report["parity"]
    assert (tmp_path / "out" / "model-f16.gguf").is_file()


def test_kill_9_in_the_middle_then_the_same_command(shared: Acc, model: Path, bundle: Path, tmp_path: Path) -> None:
    before = f"{PASSES},note{{text=killed}}"
    child = shared.start(*_compile(model, tmp_path / "out", passes=f"{before},bad{{way=sleep}}"))
    _wait_for(child.stderr, "note{text=killed}")
    time.sleep(0.3)
    child.kill()
    child.wait()
    assert not (tmp_path / "out").exists()
    _, told = shared(*_compile(model, tmp_path / "out", passes=before))
    assert "] note{text=killed}  from the store" in told
    assert told.count("from the store") == len(before.split(",")) - 2  # two commas are inside braces
    assert (tmp_path / "out" / "model.gguf").is_file()


def test_two_compiles_of_one_output(shared: Acc, model: Path, bundle: Path, tmp_path: Path) -> None:
    passes = f"{PASSES},note{{text=two}},bad{{way=sleep}}"
    first = shared.start(*_compile(model, tmp_path / "out", passes=passes))
    _wait_for(first.stderr, "note{text=two}")
    _, told = shared(*_compile(model, tmp_path / "out"), code=2)
    assert "another acc is writing this folder just now" in told
    first.kill()
    first.wait()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root to mount a small tmpfs")
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)], check=False)
    if done.returncode:
        pytest.skip("cannot mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_under_the_store(site: Path, model: Path, small_disk: Path, tmp_path: Path) -> None:
    acc = Acc(site, small_disk / "store")
    _, told = acc(*_compile(model, tmp_path / "out"), code=2)
    assert "no space left on the disk" in told
    assert "acc gc" in told
    assert not (tmp_path / "out").exists()
    assert not list((small_disk / "store" / "scratch").iterdir())


def test_a_full_disk_under_the_output(shared: Acc, bundle: Path, model: Path, small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(b"x" * (2 << 20))
    _, told = shared(*_compile(model, small_disk / "out"), code=2)
    assert f"error[ACC502]: {small_disk}: no space left on the disk to write the bundle" in told
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def test_a_read_only_output_is_found_before_any_work(shared: Acc, model: Path, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    _, told = shared(*_compile(model, small_disk / "out"), code=2)
    assert "read-only file system" in told
    assert "error[ACC501]" in told
    assert "[1/" not in told


def _wait_for(stream: Any, name: str) -> None:
    """Read stderr until a pass is told to be done."""
    seen = []
    for line in stream:
        seen.append(line)
        if f"] {name}  " in line:
            return
    raise AssertionError(f"{name} did not end: {seen}")
