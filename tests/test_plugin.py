"""A package outside acc, installed the way a user installs it: its pass, backend and target are found and used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

from acc.diag import AccError
from acc.passes_api import Context
from acc.target import Device, Target, Workload
from acc.trace import trace

SOURCE = Path(__file__).parent / "plugin"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plug-in package, installed by pip from a copy, so that the work tree stays clean."""
    folder = tmp_path_factory.mktemp("plugin")
    shutil.copytree(SOURCE, folder / "source")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(folder / "site"), str(folder / "source")], check=True)
    return folder / "site"


@pytest.fixture
def tiny(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama", intermediate_size=200)


@pytest.fixture
def eager(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The backend, imported from where it was installed; its child processes find it there too."""
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.setenv("PYTHONPATH", str(installed))
    from acc_eager.backend import Eager  # type: ignore[import-not-found, unused-ignore]

    return Eager()


@pytest.fixture
def target() -> Target:
    device = Device("cpu", "cpu", 1 << 30, 1e9, {}, "detected", here=True, threads=1)
    return Target("cpu-eager", device, "eager", Workload("tiny", 16, 4), quant="f32")


def acc(installed: Path, *arguments: str | Path, code: int = 0) -> str:
    """Run the command line with the plug-in on the path; its output, both streams."""
    environment = {**os.environ, "PYTHONPATH": str(installed), "COLUMNS": "200"}
    command = [str(Path(sys.executable).parent / "acc"), *map(str, arguments)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == code, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def context(folder: Path) -> Context:
    return Context(folder, folder, "key", None, None, 0, lambda step, total, what="": None)


def test_listed_beside_the_built_in_ones(installed: Path) -> None:
    assert "round-ffn" in acc(installed, "ls", "passes")
    assert "eager" in acc(installed, "ls", "backends")
    assert "cpu-eager" in acc(installed, "ls", "targets")


def test_its_pass_runs_in_a_pipeline(installed: Path, tiny: Path, tmp_path: Path) -> None:
    printed = acc(installed, "opt", tiny, "-p", "round-ffn{to=64}", "--store", tmp_path / "store")
    assert "192 / 200" in printed


def test_its_target_is_checked(installed: Path, tiny: Path, tmp_path: Path) -> None:
    told = acc(installed, "check", tiny, "--target", "cpu-eager", "--store", tmp_path / "store")
    assert "transformers" in told
    assert "32" in told  # bits per weight


def test_a_wrong_option_of_its_pass_is_told(installed: Path, tiny: Path, tmp_path: Path) -> None:
    told = acc(installed, "opt", tiny, "-p", "round-ffn{too=64}", "--store", tmp_path / "store", code=2)
    assert "`to`" in told
    assert "Traceback" not in told


def test_the_engine_computes_what_pytorch_does(eager: Any, target: Target, tiny: Path) -> None:
    tokens = list(range(5, 30))
    with eager.open(tiny, target, context=32) as session:
        got, greedy = session.logits(tokens), session.generate(tokens, 4)
        assert session.tokenize("def test") == AutoTokenizer.from_pretrained(tiny).encode("def test")
        assert session.memory()["weights"] == 4 * trace(AutoConfig.from_pretrained(tiny)).parameters()
    model = LlamaForCausalLM.from_pretrained(tiny)
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
        continued = model.generate(torch.tensor([tokens]), max_new_tokens=4, do_sample=False)[0, len(tokens) :]
    torch.testing.assert_close(torch.from_numpy(got), expected, rtol=1e-4, atol=1e-4)
    assert greedy == continued.tolist()


def test_a_killed_engine_is_a_diagnostic(eager: Any, target: Target, tiny: Path) -> None:
    with eager.open(tiny, target, context=32) as session:
        session.logits([1, 2])
        (process,) = session._pool._processes.values()
        process.kill()
        with pytest.raises(AccError, match="the engine's process died"):
            session.logits([1, 2])


def test_its_cost_model_is_fitted_to_measurements(eager: Any, target: Target, tiny: Path, tmp_path: Path) -> None:
    ir = trace(AutoConfig.from_pretrained(tiny))
    table = eager.profile(ir, target, context(tmp_path))
    probes = json.loads((tmp_path / Path(table.path).name).read_text())
    costs = eager.cost_model(tmp_path / Path(table.path).name, ir, target).predict(ir.model_shape(), target.workload)
    assert costs.tpot.source == "interpolated"
    assert abs(costs.tpot.value - probes[0]["tpot"]) <= 1.001 * costs.tpot.error * probes[0]["tpot"]
    with pytest.raises(AccError, match="no data sheet"):
        eager.cost_model(None, ir, target)
