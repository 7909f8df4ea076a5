"""What acc asks of llama.cpp, answered by the real engine: logits, tokens, time, memory."""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_files import cpu_target, reference_logits, write_llama

from acc.backends.llamacpp import LlamaCpp
from acc.backends.llamacpp.session import LlamaSession, open_session
from acc.diag import AccError
from acc.target import Workload

TOKENS = [1, 5, 9, 200, 33, 7, 8]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    path = tmp_path_factory.mktemp("engine") / "tiny.gguf"
    return path, write_llama(path, heads=2, kv_heads=1)


@pytest.fixture
def session(tiny: tuple[Path, dict[str, np.ndarray]]) -> Iterator[LlamaSession]:
    with open_session(tiny[0], cpu_target(), context=64) as opened:
        assert isinstance(opened, LlamaSession)
        yield opened


def test_logits_of_every_position_equal_an_independent_implementation(
    session: LlamaSession, tiny: tuple[Path, dict[str, np.ndarray]]
) -> None:
    found = session.logits(TOKENS)
    wanted = reference_logits(tiny[1], TOKENS, heads=2, kv_heads=1)
    assert found.dtype == np.float32
    assert found.shape == (7, 320)
    assert np.abs(found - wanted).max() < 0.01 < wanted.std() / 10
    again = session.logits(TOKENS[:4])  # nothing is left in the cache of the request before
    assert np.abs(again - found[:4]).max() < 0.01


def test_prompts_longer_than_a_batch_give_the_same_logits(tiny: tuple[Path, dict[str, np.ndarray]]) -> None:
    tokens = [int(token) for token in np.random.default_rng(0).integers(0, 320, 50)]
    with open_session(tiny[0], cpu_target(n_batch=16, n_ubatch=16), context=64) as session:
        found = session.logits(tokens)
    assert np.abs(found - reference_logits(tiny[1], tokens, heads=2, kv_heads=1)).max() < 0.01


def test_greedy_tokens_are_the_argmax_of_the_logits(session: LlamaSession) -> None:
    tokens = session.generate(TOKENS, 6)
    assert len(tokens) == 6
    logits = session.logits([*TOKENS, *tokens])
    assert tokens == logits[len(TOKENS) - 1 : -1].argmax(axis=1).tolist()


def test_time_is_per_token_and_grows_with_the_work(tiny: tuple[Path, dict[str, np.ndarray]]) -> None:
    with open_session(tiny[0], cpu_target(), context=512) as session:
        assert isinstance(session, LlamaSession)
        first, steps = session.round(Workload("w", prompt=64, output=8))
        assert len(steps) == 7
        assert min(steps) > 0
        long, _ = min(session.time(Workload("w", prompt=480, output=2)) for _ in range(3))
        short, _ = min(session.time(Workload("w", prompt=8, output=2)) for _ in range(3))
        assert long > short
        assert first > 0


def test_several_requests_at_once_are_timed_and_counted(tiny: tuple[Path, dict[str, np.ndarray]]) -> None:
    workload = Workload("w", prompt=16, output=5, batch=4)
    with open_session(tiny[0], cpu_target(workload), context=21, batch=4) as four:
        ttft, tpot = four.time(workload)
        kv = four.memory()["kv"]
    with open_session(tiny[0], cpu_target(), context=21) as one:
        assert kv == pytest.approx(4 * one.memory()["kv"], rel=0.1)  # the log rounds to 0.01 MiB
        with pytest.raises(ValueError, match="opened for 1"):
            one.time(workload)
    assert min(ttft, tpot) > 0


@pytest.mark.parametrize("kind", ["F16", "Q4_0"])
@pytest.mark.parametrize("tied", [False, True])
def test_memory_counts_what_is_needed_once(tmp_path: Path, kind: str, tied: bool) -> None:
    path = tmp_path / "model.gguf"
    write_llama(path, hidden=256, heads=8, kv_heads=4, ffn=512, vocab=2048, kind=kind, tied=tied)
    with open_session(path, cpu_target(), context=256) as session:
        memory = session.memory()
    # K and V, 2 layers, 4 heads of 32, 256 tokens, 2 bytes each; the log rounds to 0.01 MiB.
    assert memory["kv"] == pytest.approx(2 * 2 * 4 * 32 * 256 * 2, rel=0.01)
    assert memory["total"] == sum(memory[part] for part in ("weights", "kv", "compute", "output"))
    stored = path.stat().st_size
    embedding = 2048 * 256 * (2 if kind == "F16" else 18 / 32)
    # This engine rearranges Q4_0 and then keeps the output's copy of a tied embedding beside the one it reads rows of.
    twice = embedding if tied and memory["repacked"] else 0
    assert memory["weights"] == pytest.approx(stored + twice, abs=4096)
    assert (memory["repacked"] > 0) <= (kind == "Q4_0")
    assert memory["peak_rss"] > memory["weights"]


def test_options_reach_the_engine(tiny: tuple[Path, dict[str, np.ndarray]]) -> None:
    with open_session(tiny[0], cpu_target(flash_attn="on", type_k="q8_0", type_v="q8_0"), context=256) as quantised:
        assert isinstance(quantised, LlamaSession)
        assert quantised.details["flash_attn_used"] == "on"
        small = quantised.memory()["kv"]
        coarse = quantised.logits(TOKENS)
    with open_session(tiny[0], cpu_target(flash_attn="off"), context=256) as plain:
        assert isinstance(plain, LlamaSession)
        assert plain.details["flash_attn_used"] == "off"
        assert small < 0.6 * plain.memory()["kv"]
        assert 0 < np.abs(plain.logits(TOKENS) - coarse).max() < 0.2
        assert plain.details["threads"] == 1
        assert plain.info.version
        assert "CPU" in plain.info.build


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"flash_atn": "on"}, "did you mean `flash_attn`"),
        ({"flash_attn": "yes"}, "does not take `yes`"),
        ({"type_k": "q3_k"}, "does not take `q3_k`"),
        ({"n_batch": 0}, "takes a whole number above 0, not 0"),
        ({"timeout": -1}, "takes seconds above 0"),
        ({"origin": "cloud"}, "is no way to an engine"),
    ],
)
def test_a_wrong_option_is_named(tiny: tuple[Path, dict[str, np.ndarray]], options: dict[str, Any], words: str) -> None:
    with pytest.raises(AccError, match=words):
        open_session(tiny[0], cpu_target(**options), context=64)


def test_a_file_without_tokenizer_says_so_and_the_session_goes_on(session: LlamaSession) -> None:
    with pytest.raises(AccError, match="holds no tokenizer"):
        session.tokenize("text")
    assert session.generate(TOKENS, 1)


def test_smollm2_talks(smollm2: Path) -> None:
    with open_session(smollm2, cpu_target(), context=128) as session:
        assert isinstance(session, LlamaSession)
        tokens = session.tokenize("The capital of France is")
        assert tokens == [504, 3575, 282, 4649, 314]
        assert session.logits(tokens).shape == (5, 49152)
        assert "Paris" in session.detokenize(session.generate(tokens, 8))
        assert session.tokenize("<|im_start|>user") == [1, 4093]


def test_the_backend_opens_and_tells_which_engine_it_used() -> None:
    backend = LlamaCpp()
    engines = backend.engines()
    assert engines, "no llama.cpp here: `make setup` installs the prebuilt one"
    assert dataclasses.astuple(engines[0])[0] == "llamacpp"
    assert os.path.exists(engines[0].path)


def test_the_serving_command_has_the_options_that_were_measured(smollm2: Path) -> None:
    target = cpu_target(Workload("chat", 100, 28, batch=2), flash_attn="on")
    server, _ = LlamaCpp().serve(smollm2, target)
    assert server == f"llama-server -m {smollm2} -c 256 -np 2 -t 1 -b 2048 -ub 512 -fa on"


@pytest.mark.slow
def test_the_prebuilt_engine_serves_by_its_command(smollm2: Path) -> None:
    _, command = LlamaCpp().serve(smollm2, cpu_target(Workload("chat", 100, 28)))
    started = [sys.executable, *shlex.split(command)[1:]]
    with subprocess.Popen(started, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        limit = threading.Timer(120, server.kill)
        limit.start()
        said = server.stdout.readline()
        limit.cancel()
        server.kill()
    assert said.startswith("http://127.0.0.1:")
