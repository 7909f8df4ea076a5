"""The command line: exit codes, what goes to which stream, exact words, kill -9 and Ctrl-C, no traceback ever."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command import Acc


def test_help_is_fast_and_lists_every_command(acc: Acc) -> None:
    used = []
    for _ in range(3):
        start = _processor_seconds()
        out, err = acc("--help")
        used.append(_processor_seconds() - start)
    assert min(used) < 0.5  # processor time: the machine may have other work
    for command in [
        "compile",
        "opt",
        "inspect",
        "check",
        "profile",
        "bench",
        "run",
        "ls",
        "explain",
        "gc",
        "doctor",
        "engine",
    ]:
        assert f" {command} " in out
    assert err == ""


def _processor_seconds() -> float:
    """Of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, acc.cli; print({'torch', 'transformers', 'numpy', 'gguf', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("compile", "x", "-t", "cpu-lamacpp", "--tpot", "0.7x"), "error[ACC301]: cpu-lamacpp: unknown target"),
        (("compile", "x", "-t", "cpu-llamacpp"), "error[ACC404]: cpu-llamacpp: no limit is given"),
        (("compile", "x", "-t", "cpu-llamacpp", "--tpot", "8"), "error[ACC401]: --tpot: `8` has no unit"),
        (("compile", "x", "-t", "cpu-llamacpp", "--tpot", "-8ms"), "error[ACC402]: --tpot: `-8ms` is not more than"),
        (("compile", "x", "-t", "cpu-llamacpp", "--tpot", "2x"), "error[ACC403]: limits: the parent itself keeps"),
        (("compile", "x", "-t", "rtx5070-llamacpp", "--memory", "99GiB"), "error[ACC403]: --memory: allows 99 GiB"),
        (("compile", "x", "-t", "cpu-llamacpp", "--workload", "ncp"), "hint: did you mean `npc`?"),
        (("compile", "x", "-t", "cpu-llamacpp", "--effort", "quik"), "error[ACC314]: --effort: unknown effort `quik`"),
        (("compile", "x", "-t", "cpu-llamacpp", "--tpot", "0.7x", "-p", "notte"), "hint: did you mean `note`?"),
        (("compile", "x", "-t", "cpu-llamacpp", "--tpot", "0.7x", "-p", "read"), "error[ACC1"),
        (("opt", "x", "-p", "options{hole=1}"), "hint: did you mean `whole`?"),
        (("opt", "x", "-p", "note", "--stop-after", "read"), "error[ACC334]: --stop-after: the pipeline has no pass"),
        (("ls", "target"), "hint: did you mean `targets`"),
        (("explain", "ACC4O1"), "hint: did you mean `ACC4"),
        (("gc", "--size", "3"), "error[ACC401]: --size: `3` has no unit"),
        (("run", "gone", "hello"), "error[ACC506]: gone: is not a bundle of acc"),
        (("bench", "gone"), "error[ACC506]: gone: is not a bundle of acc"),
        (("profile", "x", "-t", "rtx5070-llamacpp"), "error[ACC508]: rtx5070: is not this machine"),
        (("compile", "x", "-t", "cpu-llamacpp", "--tpot", "0.7x", "--calib", "gone.txt"), "error[ACC333]: gone.txt"),
    ],
)
def test_user_errors_are_one_sentence_and_exit_code_2(
    arguments: tuple[str, ...],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from passes_for_tests import registered

    from acc.cli import app

    monkeypatch.setenv("ACC_STORE", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)
    with registered(), pytest.raises(SystemExit) as ended:
        app(list(arguments))
    out, err = capsys.readouterr()
    assert ended.value.code == 2, err
    assert text in err
    assert err.count("error[") == 1
    assert "Traceback" not in err
    assert out == ""
    assert [path.name for path in tmp_path.iterdir()] in ([], ["store"])


def test_unknown_commands_and_options_exit_with_2(acc: Acc) -> None:
    assert "No such command" in acc("compil", code=2)[1]
    assert "--targett" in acc("compile", "x", "--targett", "y", code=2)[1]


def test_data_goes_to_stdout_and_the_rest_to_stderr(acc: Acc, state: Path) -> None:
    out, err = acc("opt", state, "-p", "note{text=hello},read", "--json")
    facts = json.loads(out)
    assert facts["note{text=hello}"]["text"] == "hello"
    assert "a library prints" in err
    assert "[1/2] note{text=hello}" in err
    assert "[2/2] read" in err
    again = acc("opt", state, "-p", "note{text=hello},read", "--json")
    assert json.loads(again[0]) == facts
    assert again[1].count("from the store") == 2


def test_a_pipeline_is_printed_as_it_is_understood(acc: Acc) -> None:
    out, _ = acc("opt", "x", "-p", "note { text = x } ,  options{ whole=3 flag}", "--print-pipeline")
    assert out == "note,options{whole=3,flag=true}\n"


@pytest.mark.parametrize("what", ["targets", "passes", "backends", "options", "devices", "workloads", "efforts"])
def test_lists_are_tables_and_json(acc: Acc, what: str) -> None:
    names = [next(iter(row.values())) for row in json.loads(acc("ls", what, "--json")[0])]
    table, _ = acc("ls", what)
    assert names
    assert all(name in table for name in names)


def test_every_code_is_explained(acc: Acc) -> None:
    assert "A quantity needs a number and a unit" in acc("explain", "acc401")[0]


def test_a_bug_of_a_pass_shows_a_traceback_only_on_request(acc: Acc, state: Path) -> None:
    _, err = acc("opt", state, "-p", "bad", code=2)
    assert "error[ACC321]: pass 1 of 1, `bad`: ValueError: seven is not a name" in err
    assert "run it alone with: acc opt " in err
    shown = acc.start("--debug", "opt", state, "-p", "bad").communicate()[1]
    assert "Traceback" in shown


def test_kill_9_then_the_same_command(acc: Acc, state: Path) -> None:
    pipeline = "note,options,bad{way=sleep}"
    child = acc.start("opt", state, "-p", pipeline)
    _wait_for(child, "[2/3] options")
    child.kill()
    child.wait()
    assert len(list((acc.store / "results").iterdir())) == 2
    child = acc.start("opt", state, "-p", pipeline)
    lines = _wait_for(child, "[2/3] options")
    child.kill()
    child.wait()
    assert [line.split()[-3:] for line in lines] == [["from", "the", "store"]] * 2
    assert acc("gc", "--json")[0]
    assert not list((acc.store / "scratch").iterdir())


def test_ctrl_c_says_how_to_go_on(acc: Acc, state: Path) -> None:
    child = acc.start("opt", state, "-p", "note,bad{way=sleep}")
    _wait_for(child, "[1/2] note")
    time.sleep(0.5)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "interrupted in pass 2 of 2, `bad{way=sleep}`" in err
    assert "finished passes are kept: the same command goes on from there" in err
    assert "Traceback" not in err
    assert not list((acc.store / "scratch").iterdir())


def test_a_closed_pipe_is_no_traceback(acc: Acc) -> None:
    child = acc.start("ls", "targets")
    assert child.stdout is not None
    child.stdout.close()
    assert child.stderr is not None
    assert "Traceback" not in child.stderr.read()


def test_an_output_folder_that_is_not_ours_is_left_alone(acc: Acc, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    _, err = acc("compile", "x", "-t", "cpu-llamacpp", "--tpot", "0.7x", "-o", mine, code=2)
    assert f"error[ACC505]: {mine}: exists and is not a bundle of acc, so it is left alone" in err
    assert [path.name for path in tmp_path.iterdir() if path != acc.store] == ["mine"]
    assert (mine / "thesis.txt").read_text() == "years of work"


def _wait_for(child: subprocess.Popen[str], start: str) -> list[str]:
    """Lines of stderr up to the first that starts so."""
    lines: list[str] = []
    stream: Any = child.stderr
    for line in stream:
        lines.append(line.rstrip())
        if line.startswith(start):
            return lines
    raise AssertionError(f"no line starts with {start}: {lines}")
