"""Work in an engine outside a compile: ask a bundle, measure it beside its parent, measure a cost table."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acc import bundle, registry, targetfiles
from acc.compile import backend_of, subject
from acc.diag import AccError
from acc.ir import Artifact
from acc.manager import Instrument, PassManager
from acc.parent import open_parent
from acc.store import atomic, writing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from acc.store import Store
    from acc.target import Target


def ask(folder: Path, prompt: str, tokens: int, raw: bool) -> str:
    """What the bundle answers, greedily, at most `tokens` tokens; `raw` leaves the chat template away."""
    from acc.checkpoint import Checkpoint

    found = bundle.read(folder)
    target, backend = found.report.target, backend_of(found.report.target)
    tokenizer = Checkpoint.at(folder / "hf").tokenizer()
    text = prompt
    if not raw and tokenizer.chat_template:
        message = [{"role": "user", "content": prompt}]
        text = str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
    artifact = Path(found.ir.artifacts[backend.artifact].path)
    size = len(tokenizer(text).input_ids) + tokens + 16  # the engine may cut a text into a few tokens more
    with backend.open(artifact, target, context=size) as session:
        answer = session.generate(session.tokenize(text), tokens)
    return str(tokenizer.decode(_until_end(answer, tokenizer), skip_special_tokens=True))


def bench_bundle(
    folder: Path, against: str | None, workload: str | None, store: Store, instruments: Sequence[Instrument]
) -> Mapping[str, Any]:
    """The facts of the pass `bench` on a bundle.

    Args:
        against: the parent, as a model; by default the one that the bundle was compiled from.

    Raises:
        AccError: ACC507 if the parent is not where it was; ACC508 if the target's device is not here.
    """
    found = bundle.read(folder)
    target, ir = found.report.target, found.ir
    need_device(target)
    if workload:
        cache = store.root / "machine.json"
        target = targetfiles.load(target.name, workload=workload, quant=target.quant, cache_file=cache)
    if against:
        ir = ir.with_artifacts(parent=open_parent(against, store).ir.artifacts["parent"])
    elif not Path(ir.artifacts["parent"].path).exists():
        gone = ir.artifacts["parent"].path
        raise AccError.of("ACC507", gone, "the parent is not there any more", "give --against MODEL")
    own = {kind: Artifact(str(Path(one.path).absolute()), one.digest) for kind, one in ir.artifacts.items()}
    bench = registry.passes().load("bench")()
    manager = PassManager(store, target, backend_of(target), 0, instruments)
    return manager.run([bench], ir.with_artifacts(**own)).records[-1].facts


def profile_model(
    model: str,
    target: Target,
    store: Store,
    instruments: Sequence[Instrument],
    validate: bool,
    export: Path | None,
    seed: int,
) -> Mapping[str, Any]:
    """Measure the cost table, and what it is worth on other architectures; the facts of the pass `profile`.

    Raises:
        AccError: ACC508 if the device is not here.
    """
    need_device(target)
    profile = registry.passes().load("profile")
    passes = [profile(**({"validate": True} if validate else {}))]
    run = PassManager(store, target, backend_of(target), seed, instruments).run(passes, subject(model, store))
    if export:
        with writing(export.parent, f"write {export}"), atomic(export) as temporary:
            shutil.copyfile(store.results / run.ir.artifacts["table"].path, temporary)
    return run.records[-1].facts


def need_device(target: Target) -> None:
    """Raise AccError ACC508 if the target's device is not this machine."""
    if not target.device.here:
        hint = "run it on a machine that has it"
        raise AccError.of("ACC508", target.device.name, "is not this machine, so nothing can be measured", hint)


def _until_end(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens before the first that ends a turn."""
    ends = {tokenizer.eos_token_id}
    found = list(tokens)
    return next((found[:index] for index, token in enumerate(found) if token in ends), found)
