"""The PassManager: what is run again, what is refused before any work, and what a failure tells."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from passes_for_tests import Bad, Note, Options, Read, registered, tiny_ir

from acc import pipeline
from acc.diag import AccError, NoArchFits
from acc.fingerprint import code_digest, stage_key
from acc.instruments import Dump, Meter
from acc.ir import Arch, ModelIR
from acc.manager import Instrument, Interrupted, PassManager, Run, Stage
from acc.parent import read_ir
from acc.passes_api import Context, PassResult
from acc.store import Store
from acc.target import Device, Limit, Target, Workload

IR = tiny_ir()


@pytest.fixture(autouse=True, scope="module")
def _passes() -> Iterator[None]:
    with registered():
        yield


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    Note.ran = 0
    with Store(tmp_path / "store") as opened:
        yield opened


def _run(store: Store, text: str, ir: ModelIR = IR, **surroundings: Any) -> Run:
    return PassManager(store, **surroundings).run(pipeline.parse(text), ir)


def _target(**changes: Any) -> Target:
    device = Device("desk", "cpu", 2**30, 1e9, {}, "made up")
    return dataclasses.replace(Target("test", device, "none", Workload("short", 128, 64)), **changes)


def _fault(store: Store, text: str, **surroundings: Any) -> str:
    with pytest.raises(AccError) as caught:
        _run(store, text, **surroundings)
    return str(caught.value)


def test_passes_run_in_order_and_hand_on_artifacts_and_facts(store: Store) -> None:
    run = _run(store, "note{text=hello},read")
    assert run.ir.size("hidden") == 7
    assert IR.size("hidden") == 8
    assert run.facts["read"] == {"text": "hello", "before": {"text": "hello", "target": "None"}}
    assert [record.stored for record in run.records] == [False, False]
    assert all(record.seconds >= 0 and record.peak_rss_bytes > 2**20 for record in run.records)


def test_finished_stages_are_not_run_again(store: Store) -> None:
    first = _run(store, "note,read")
    again = _run(store, "note,read")
    assert again.ir == first.ir
    assert again.facts == first.facts
    assert [record.stored for record in again.records] == [True, True]
    assert Note.ran == 1
    _run(store, "note{text=other},read")
    assert Note.ran == 2


def test_what_a_result_depends_on(store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def key(one: Any, ir: ModelIR = IR, target: Target | None = None, engine: str = "", seed: int = 0) -> str:
        return stage_key(one, ir, target=target, engine=engine, seed=seed)

    base, target = key(Note()), _target()
    assert key(Note(), target=target, engine="b1") == base  # reads nothing of the target: serves every target
    assert key(Note(text="y")) != base
    assert key(Note(), seed=1) != base
    assert key(Note(), IR.with_arch(Arch({"hidden": 4}))) != base
    limited = _target(limits=(Limit("tpot", 0.7, relative=True),))
    assert key(Read(), target=limited) != key(Read(), target=target)
    assert key(Read(), target=_target(quant="q8_0")) == key(Read(), target=target)  # reads the limits alone
    assert key(Options(), target=_target(quant="q8_0")) != key(Options(), target=target)  # reads everything
    assert key(Options(), target=target, engine="b2") != key(Options(), target=target, engine="b1")
    text = tmp_path / "calibration.txt"
    text.write_text("one")
    of_file = key(Note(text=str(text)))
    text.write_text("two")
    assert key(Note(text=str(text))) != of_file
    monkeypatch.setattr(Note, "version", 2)
    assert key(Note()) != base
    monkeypatch.undo()
    monkeypatch.setattr("acc.fingerprint.version", lambda library: "99")
    assert key(Note()) != base


def test_an_edit_counts_where_it_may_be_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "edited"
    package.mkdir()
    for name, code in {"__init__": "", "used": "A = 1", "deep": "B = 1", "other": "C = 1"}.items():
        (package / f"{name}.py").write_text(code)
    (package / "one.py").write_text("import json\nfrom edited.used import A\ndef f():\n    from . import deep\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def digest() -> str:
        code_digest.cache_clear()
        return code_digest("edited.one")

    found = digest()
    for name, counts in [("other", False), ("used", True), ("deep", True), ("one", True)]:
        with (package / f"{name}.py").open("a") as file:
            file.write("# edited\n")
        assert (digest() != found) is counts, name
        found = digest()


def test_the_rest_is_left_out_once_it_is_enough(store: Store) -> None:
    run = PassManager(store).run(pipeline.parse("note,read,bad"), IR, enough=lambda record: record.stage.number == 2)
    assert [record.stage.one.name for record in run.records] == ["note", "read"]
    assert run.ir.size("hidden") == 7


def test_a_pass_that_reads_nothing_is_handed_no_target(store: Store) -> None:
    assert _run(store, "note", target=_target()).facts["note"]["target"] == "None"


def test_what_is_shared_outlives_a_change_of_limits_and_gc_while_in_use(store: Store) -> None:
    def share(**surroundings: Any) -> Path:
        folders: list[Path] = []

        class Sharing(Note):
            name = "sharing"

            def run(self, ir: ModelIR, ctx: Context) -> PassResult:
                folders.append(ctx.shared("scores", 4096))
                return super().run(ir, ctx)

        PassManager(store, **surroundings).run([Sharing(text=str(len(surroundings)))], IR)
        return folders[0]

    folder = share()
    (folder / "scores").write_text("dear")
    assert share(target=_target()) == folder
    with Store(store.root) as other:
        other.collect()
        assert (folder / "scores").read_text() == "dear"
        store.close()
        other.collect()
    assert not folder.exists()
    assert share(seed=1) != folder


def test_needs_are_checked_before_any_work(store: Store) -> None:
    assert _fault(store, "options,read,note") == (
        "error[ACC320]: pass 2 of 3, `read`: needs `notes`, which no pass before it gives\n\nhint: put `note` before it"
    )
    assert Note.ran == 0
    assert not list(store.results.iterdir())


def test_a_pass_that_raises(store: Store) -> None:
    text = _fault(store, "note,bad", command=("--target", "mine.toml", "--tpot", "0.7x"), target=_target())
    state = next(store.states.iterdir())
    assert text == (
        "error[ACC321]: pass 2 of 2, `bad`: ValueError: seven is not a name\n\n"
        "hint: this is a bug of the pass; --debug shows where\n"
        "note[ACC322]: pass 2 of 2, `bad`: failed\n\n"
        f"hint: run it alone with: acc opt {state} --target mine.toml --tpot 0.7x --store {store.root} -p bad"
    )
    assert not list(store.scratch.iterdir())
    assert [path.name.split("-")[0] for path in store.results.iterdir()] == ["note"]
    words = shlex.split(text.partition("run it alone with: ")[2])
    again = read_ir(Path(words[2]))
    with pytest.raises(AccError, match="pass 1 of 1, `bad`: ValueError: seven is not a name"):
        _run(store, words[-1], again, target=_target())


@pytest.mark.parametrize(
    ("way", "code", "text"),
    [
        ("lie", "ACC321", "pass 1 of 1, `bad{way=lie}`: it did not leave `promised`"),
        ("mutate", "ACC321", "it changed the IR that it was given"),
        ("facts", "ACC321", "its facts are not JSON: Object of type object is not JSON serializable"),
        ("broken-ir", "ACC21", "after pass 1 of 1, `bad{way=broken-ir}`: "),
        ("disk", "ACC502", "no space left on the disk to run pass 1 of 1, `bad{way=disk}`"),
    ],
)
def test_a_pass_that_breaks_the_contract(store: Store, way: str, code: str, text: str) -> None:
    ir = ModelIR.from_json(json.loads(json.dumps(IR.to_json())))
    with pytest.raises(AccError) as caught:
        _run(store, f"bad{{way={way}}}", ir)
    assert caught.value.diagnostics[0].code.startswith(code)
    assert text in str(caught.value)
    assert not list(store.results.iterdir())
    assert not list(store.scratch.iterdir())


def test_a_broken_ir_is_found_before_the_first_pass(store: Store) -> None:
    with pytest.raises(AccError, match=r"before pass 1 of 1, `note`"):
        _run(store, "note", IR.with_arch(Arch({"hidden": 99})))
    assert Note.ran == 0


def test_exit_codes_survive_the_manager(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(self: Bad, ir: ModelIR, ctx: object) -> None:
        raise NoArchFits.of("ACC420", "test", "nothing fits")

    monkeypatch.setattr(Bad, "run", nothing)
    with pytest.raises(NoArchFits) as caught:
        _run(store, "bad")
    assert caught.value.exit_code == 1


class _Log(Instrument):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def before(self, stage: Stage, ir: ModelIR) -> None:
        self.seen.append(f"before {stage.number}")

    def progress(self, stage: Stage, step: int, total: int, what: str) -> None:
        self.seen.append(f"{step}/{total} {what}")

    def after(self, record: Any, before: ModelIR, after: ModelIR) -> None:
        self.seen.append(f"after {record.stage.number}")

    def failed(self, stage: Stage) -> None:
        self.seen.append(f"failed {stage.number}")


def test_ctrl_c_names_the_stage_and_keeps_the_others(store: Store) -> None:
    log = _Log()
    with pytest.raises(Interrupted, match=r"pass 2 of 2, `bad\{way=interrupt\}`"):
        _run(store, "note,bad{way=interrupt}", instruments=[log])
    assert log.seen == ["before 1", "1/1 written", "after 1", "before 2", "failed 2"]
    assert not list(store.scratch.iterdir())
    assert _run(store, "note").records[0].stored


def test_dumps_hold_the_text_and_the_difference(store: Store, tmp_path: Path) -> None:
    from acc import text

    run = _run(store, "note,read", instruments=[Dump(tmp_path / "dump")])
    names = ["001-note.acc", "001-note.diff", "002-read.acc", "002-read.diff"]
    assert sorted(path.name for path in (tmp_path / "dump").iterdir()) == names
    assert text.parse((tmp_path / "dump" / "002-read.acc").read_text()) == run.ir
    difference = (tmp_path / "dump" / "002-read.diff").read_text()
    assert any(line.startswith("-") and "hidden" in line for line in difference.splitlines())


def test_the_meter_sees_memory_and_time() -> None:
    with Meter(0.01) as idle:
        pass
    with Meter(0.01) as meter:
        block = bytearray(200 * 2**20)
        for _ in range(3):
            block[::4096] = b"x" * (len(block) // 4096)
    assert meter.peak_rss_bytes > idle.peak_rss_bytes + 150 * 2**20
    assert meter.seconds > 0
