"""The command line. Data goes to stdout, everything else to stderr; exit codes: 0 done, 1 nothing fits, 2 fault."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from acc.console import Guarded, emit, err, out, say, table, tell
from acc.diag import AccError, nearest

if TYPE_CHECKING:
    from acc.manager import Instrument
    from acc.store import Store
    from acc.target import Target

app = typer.Typer(cls=Guarded, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
engine_app = typer.Typer(no_args_is_help=True, help="Serving engines.")
app.add_typer(engine_app, name="engine")

Text = Optional[str]  # noqa: UP045 - Typer reads the annotations at run time
Model = Annotated[str, typer.Argument(help="A Hugging Face folder, a hub id, or a GGUF file.")]
BundleFolder = Annotated[Path, typer.Argument(help="A folder that `acc compile` wrote.")]
TargetName = Annotated[str, typer.Option("--target", "-t", help="A target's name (`acc ls targets`) or TOML file.")]
WorkloadName = Annotated[Text, typer.Option("--workload", help="A workload in place of the target's own.")]
Quant = Annotated[Text, typer.Option("--quant", help="Number format, e.g. q4_k_m.")]
Ttft = Annotated[Text, typer.Option("--ttft", help="Time to the first token: 150ms, or 0.7x of the parent's.")]
Tpot = Annotated[Text, typer.Option("--tpot", help="Time per output token: 8ms, 0.7x.")]
Throughput = Annotated[Text, typer.Option("--throughput", help="At least so many output tokens per second: 900tok/s.")]
Memory = Annotated[Text, typer.Option("--memory", help="Memory in the engine: 6GiB, 0.8x.")]
StoreFolder = Annotated[Path | None, typer.Option("--store", envvar="ACC_STORE", help="Where results are kept.")]
Seed = Annotated[int, typer.Option("--seed", help="For every random choice.")]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """AutoCompress compiler: a smaller model that keeps its limits as measured in the serving engine."""
    if version:
        from acc import __version__

        print(__version__)
        raise typer.Exit


@app.command("compile")
def compile_(
    model: Model,
    target: TargetName,
    out_folder: Annotated[Path, typer.Option("-o", "--out", help="The bundle to write.")] = Path("out"),
    workload: WorkloadName = None,
    quant: Quant = None,
    ttft: Ttft = None,
    tpot: Tpot = None,
    throughput: Throughput = None,
    memory: Memory = None,
    effort: Annotated[str, typer.Option("--effort", help="quick, normal or thorough.")] = "normal",
    pipeline: Annotated[Text, typer.Option("-p", "--pipeline", help="A pipeline in place of the effort's.")] = None,
    calib: Annotated[Optional[list[Path]], typer.Option("--calib", help="Calibration text; may be repeated.")] = None,  # noqa: UP045
    allow_fallback: Annotated[bool, typer.Option("--allow-fallback", help="Allow tensors of another type.")] = False,
    table_file: Annotated[
        Path | None, typer.Option("--table", help="A cost table from `acc profile --export`.")
    ] = None,
    f16: Annotated[bool, typer.Option("--f16", help="Keep the artifact before quantisation too.")] = False,
    dump: Annotated[Path | None, typer.Option("--dump-after-all", help="Write the IR after each pass here.")] = None,
    seed: Seed = 0,
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Compile a model for a target: search, cut, lower, verify, measure."""
    from acc import pipeline as pipelines
    from acc.compile import Request, adapt, compile_model
    from acc.report import terminal
    from acc.target import check_limits

    given = {"ttft": ttft, "tpot": tpot, "throughput": throughput, "memory": memory}
    with _store(store) as opened:
        text = pipeline or pipelines.effort(effort)
        chosen = _target(target, opened, workload, quant, given)
        check_limits(chosen)  # before passes are imported, which takes seconds
        passes = adapt(pipelines.parse(text), calib or (), allow_fallback)
        command = "acc " + shlex.join(sys.argv[1:])
        again = _rerun(target, workload, quant, given)
        request = Request(model, chosen, passes, out_folder, command, seed, f16, again, table_file)
        report = compile_model(request, opened, _instruments(dump))
    if as_json:
        from acc.report import data

        emit(data.dump(report))
    else:
        out().print(terminal.summary(report))
    say(f"wrote {out_folder}")


@app.command()
def opt(
    model: Annotated[str, typer.Argument(help="A model, a bundle, or an IR that a dump or a failed pass left.")],
    pipeline: Annotated[str, typer.Option("-p", "--pipeline", help="e.g. 'calibrate{tokens=16384},order'")],
    target: Annotated[Text, typer.Option("--target", "-t")] = None,
    workload: WorkloadName = None,
    quant: Quant = None,
    ttft: Ttft = None,
    tpot: Tpot = None,
    throughput: Throughput = None,
    memory: Memory = None,
    dump: Annotated[Path | None, typer.Option("--dump-after-all", help="Write the IR after each pass here.")] = None,
    stop_after: Annotated[Text, typer.Option("--stop-after", help="The last pass to run.")] = None,
    print_pipeline: Annotated[bool, typer.Option("--print-pipeline", help="Print the pipeline and stop.")] = False,
    seed: Seed = 0,
    store: StoreFolder = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the facts of each pass, not the IR.")] = False,
) -> None:
    """Run any pipeline; the IR after it goes to stdout as text."""
    from acc import pipeline as pipelines
    from acc import text
    from acc.compile import backend_of, subject, until
    from acc.manager import PassManager, check_needs

    passes = until(pipelines.parse(pipeline), stop_after)
    if print_pipeline:
        print(pipelines.format(passes))
        return
    given = {"ttft": ttft, "tpot": tpot, "throughput": throughput, "memory": memory}
    with _store(store) as opened:
        chosen = _target(target, opened, workload, quant, given) if target else None
        backend = backend_of(chosen) if chosen else None
        ir = subject(model, opened)
        check_needs(passes, ir)
        command = _rerun(target, workload, quant, given) if target else ()
        manager = PassManager(opened, chosen, backend, seed, _instruments(dump), command)
        run = manager.run(passes, ir)
    if as_json:
        emit({record.stage.spec: record.facts for record in run.records})
    else:
        print(text.format(run.ir), end="")


@app.command()
def inspect(model: Model, store: StoreFolder = None, as_json: Json = False) -> None:
    """The dims of a model: names, roles, sizes; which may be cut, which are pinned and why."""
    from acc import show
    from acc.compile import subject

    with _store(store) as opened:
        ir = subject(model, opened)
    emit(show.dims_json(ir)) if as_json else show.dims(ir)


@app.command()
def check(
    model: Model,
    target: TargetName,
    quant: Quant = None,
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """What would convert, what would fall back, file size and bits per weight; no weights are read."""
    from acc import show
    from acc.compile import backend_of, subject

    with _store(store) as opened:
        chosen = _target(target, opened, None, quant, {})
        backend, ir = backend_of(chosen), subject(model, opened)
    found, plan = backend.check(ir, chosen), backend.plan(ir, chosen.quant)
    emit(show.check_json(found, plan)) if as_json else show.check(found, plan, chosen)
    tell(dict.fromkeys([*found.diagnostics, *plan.notes]))
    if any(one.level == "error" for one in found.diagnostics):
        raise typer.Exit(2)


@app.command()
def profile(
    model: Model,
    target: TargetName,
    workload: WorkloadName = None,
    quant: Quant = None,
    validate: Annotated[bool, typer.Option("--validate", help="Measure architectures outside the fit too.")] = False,
    export: Annotated[Path | None, typer.Option("--export", help="Copy the table to this file.")] = None,
    seed: Seed = 0,
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Measure the cost table of this device and engine for a model's shapes; goes on where it was stopped."""
    from acc import show
    from acc.serve import profile_model

    with _store(store) as opened:
        chosen = _target(target, opened, workload, quant, {})
        facts = profile_model(model, chosen, opened, _instruments(None), validate, export, seed)
    emit(facts) if as_json else show.facts(facts)


@app.command()
def bench(
    bundle: BundleFolder,
    against: Annotated[Text, typer.Option("--against", help="The parent, if it is not where it was.")] = None,
    workload: WorkloadName = None,
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Measure a bundle in the engine, interleaved with its parent."""
    from acc import show
    from acc.serve import bench_bundle

    with _store(store) as opened:
        facts = bench_bundle(bundle, against, workload, opened, _instruments(None))
    emit(facts) if as_json else show.bench(facts)


@app.command()
def run(
    bundle: BundleFolder,
    prompt: Annotated[str, typer.Argument(help="What the user says.")],
    tokens: Annotated[int, typer.Option("--tokens", "-n", min=1, help="At most so many tokens.")] = 128,
    raw: Annotated[bool, typer.Option("--raw", help="Without the chat template.")] = False,
) -> None:
    """Ask a bundle something, in its engine."""
    from acc.serve import ask

    print(ask(bundle, prompt, tokens, raw))


@app.command("ls")
def list_(what: Annotated[str, typer.Argument(help="targets, passes or backends")], as_json: Json = False) -> None:
    """What is installed: targets, passes, backends, devices, workloads, engines, efforts."""
    from acc import show

    if what not in show.LISTS:
        raise AccError.of("ACC331", what, "is nothing that can be listed", nearest(what, show.LISTS))
    columns, rows, faults = show.LISTS[what]()
    emit([dict(zip(columns, row, strict=True)) for row in rows]) if as_json else table(columns, rows)
    tell(faults)


@app.command()
def explain(code: Annotated[str, typer.Argument(help="The code of a diagnostic, e.g. ACC401.")]) -> None:
    """More about a diagnostic."""
    from acc.diag import explanations

    known = explanations()
    if code.upper() not in known:
        raise AccError.of("ACC332", code, "no diagnostic has this code", nearest(code.upper(), known))
    print(known[code.upper()])


@app.command()
def gc(
    days: Annotated[float | None, typer.Option("--days", min=0, help="Results not used for so many days.")] = None,
    size: Annotated[Text, typer.Option("--size", help="The longest unused ones, until so much is kept: 10GiB.")] = None,
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Remove results from the store: all, or by age or size; never what a running acc uses."""
    from acc.quantity import quantity, written

    with _store(store) as opened:
        done = opened.collect(days=days, max_bytes=int(quantity(size, "B", "--size")[0]) if size else None)
    if as_json:
        emit(vars(done))
    else:
        told = f"removed {done.removed} ({written(done.removed_bytes, 'B')}), kept {done.kept}"
        print(f"{told} ({written(done.kept_bytes, 'B')})")


@app.command()
def doctor(as_json: Json = False) -> None:
    """What is usable on this machine, and how to get the rest."""
    from acc.doctor import examine

    found = examine()
    emit(found.to_json()) if as_json else found.show()
    raise typer.Exit(0 if found.usable else 2)


@engine_app.command("build")
def build(
    backend: Annotated[str, typer.Argument(help="e.g. llamacpp")],
    source: Annotated[Path | None, typer.Option("--source", help="A source tree that is here already.")] = None,
) -> None:
    """Build an engine for this machine."""
    from acc.doctor import build_engine

    build_engine(backend, source)


def _store(folder: Path | None) -> Store:
    from acc.store import Store

    if folder is None:
        import platformdirs

        folder = Path(platformdirs.user_cache_dir("acc"))
    return Store(folder)


def _target(name: str, store: Store, workload: str | None, quant: str | None, given: dict[str, str | None]) -> Target:
    from acc import targetfiles

    limits = targetfiles.limits({name: text for name, text in given.items() if text})
    loaded = targetfiles.load(name, workload=workload, quant=quant, cache_file=store.root / "machine.json")
    return loaded.with_limits(limits)


def _instruments(dump: Path | None) -> list[Instrument]:
    from acc.instruments import Dump, Progress

    return [Progress(err()), *([Dump(dump)] if dump else [])]


def _rerun(target: str | None, workload: str | None, quant: str | None, given: dict[str, str | None]) -> list[str]:
    """The options that say the same target again, for commands that acc proposes."""
    named = {"target": target, "workload": workload, "quant": quant, **given}
    return [word for name, value in named.items() if value for word in (f"--{name}", value)]


def main() -> None:
    """The console script `acc`."""
    app()


if __name__ == "__main__":
    main()
