"""One file in every llama.cpp at hand: the prebuilt wheel, a folder of the user's, another binding's older version."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from engine_files import cpu_target, reference_logits, write_llama

from acc.backends.llamacpp.discover import built_folder, in_folder, in_wheel
from acc.backends.llamacpp.session import LlamaSession, open_session

pytestmark = pytest.mark.slow

TOKENS = [int(token) for token in np.random.default_rng(1).integers(0, 2048, 40)]


def folders() -> dict[str, Path]:
    """Shared libraries of llama.cpp on this machine, by where they come from."""
    found: dict[str, Path] = {}
    wheel = in_wheel()
    if wheel is not None and wheel.library is not None:
        found["wheel"] = wheel.library
    spec = importlib.util.find_spec("llama_cpp")
    if spec is not None and spec.submodule_search_locations:
        found["llama_cpp"] = Path(spec.submodule_search_locations[0])
    if (built_folder() / "build.json").is_file():
        found["built"] = built_folder()
    return found


@pytest.fixture(scope="module", params=["F16", "Q8_0", "Q4_0"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """A file and its logits, computed without any engine."""
    path = tmp_path_factory.mktemp("versions") / f"{request.param}.gguf"
    tensors = write_llama(path, hidden=256, heads=8, kv_heads=4, ffn=512, vocab=2048, layers=3, kind=request.param)
    return path, reference_logits(tensors, TOKENS, heads=8, kv_heads=4)


@pytest.mark.parametrize("origin", ["wheel", "llama_cpp", "built"])
def test_every_version_gives_the_same_logits(model: tuple[Path, np.ndarray], origin: str) -> None:
    path, wanted = model
    if origin not in folders():
        pytest.skip(f"no llama.cpp of this kind here: {origin}")
    with open_session(path, cpu_target(path=str(folders()[origin])), context=64) as session:
        assert isinstance(session, LlamaSession)
        found = session.logits(TOKENS).astype(np.float64)
        greedy = session.generate(TOKENS, 8)
    # Engines round activations to 8 bits for quantised matrices; the distribution must be the same all the same.
    assert _kl(wanted, found) < (1e-5 if path.stem == "F16" else 3e-3)
    assert len(greedy) == 8


def test_the_oldest_version_at_hand_gives_the_same_tokens(model: tuple[Path, np.ndarray]) -> None:
    """cyllama's getters of logits fail in its version, so tokens are compared."""
    if importlib.util.find_spec("cyllama") is None:
        pytest.skip("cyllama is not installed (pip install cyllama)")
    path, _ = model
    program = Path(__file__).with_name("engine_cyllama.py")
    command = [sys.executable, str(program), str(path), json.dumps(TOKENS), "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    with open_session(path, cpu_target(origin="wheel"), context=64) as session:
        assert json.loads(done.stdout.splitlines()[-1]) == session.generate(TOKENS, 8)


@pytest.mark.skipif(sys.platform != "linux", reason="ELF")
def test_a_folder_that_lost_its_rpath_still_works(model: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    if "llama_cpp" not in folders():
        pytest.skip("no folder of shared libraries here (pip install llama-cpp-python)")
    for file in (folders()["llama_cpp"] / "lib").glob("*.so*"):
        (tmp_path / file.name).write_bytes(file.read_bytes().replace(b"$ORIGIN\0", b"/nowher\0"))
    with open_session(model[0], cpu_target(path=str(tmp_path)), context=64) as session:
        assert len(session.generate(TOKENS, 4)) == 4


def test_llama_bench_agrees_with_the_session(model: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    bench = in_folder(built_folder(), "built").bench if "built" in folders() else None
    if bench is None:
        pytest.skip("no llama-bench here: `acc engine build llamacpp` makes one")
    for file in bench.parent.iterdir():
        if file.name != "libllama.so":  # the tool finds libllama.so.0; acc must not find a library
            (tmp_path / file.name).symlink_to(file)
    target = cpu_target(path=str(tmp_path))
    with open_session(model[0], target, context=64) as session:
        ttft, tpot = session.time(target.workload)
    assert 0 < tpot < ttft < 1


def _kl(wanted: np.ndarray, found: np.ndarray) -> float:
    """Mean KL(wanted || found) of the softmaxes, nats per position."""
    p, q = (values - np.logaddexp.reduce(values, axis=1, keepdims=True) for values in (wanted, found))
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())
