"""What must hold of a Hugging Face folder before any work is spent on it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acc.diag import AccError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from acc.checkpoint import Checkpoint

_CHUNK = 1 << 24
"""Elements that the NaN check looks at at once."""


def check(checkpoint: Checkpoint, cache: Path) -> None:
    """Check a folder: a causal LM that Transformers knows, whose shards are whole, fit its config and hold numbers.

    The weights are read once per content: the result is remembered in `cache` under the checkpoint's digest.

    Raises:
        AccError: ACC102 to ACC109, ACC112.
    """
    check_config(checkpoint)
    ties = check_shapes(checkpoint)
    note = cache / "checked" / checkpoint.digest
    if not note.is_file():
        from acc.checkpoint import remember

        for name in checkpoint.names():
            check_numbers(checkpoint.folder, name, checkpoint.read(name))
        _check_ties(checkpoint, ties)
        remember(note, "")


def check_config(checkpoint: Checkpoint) -> None:
    """A readable config.json of an unquantised causal LM that needs no code of its own."""
    folder = checkpoint.folder
    raw = _raw_config(folder)
    model_type = raw.get("model_type")
    if "auto_map" in raw and not _known(model_type):
        raise AccError.of(
            "ACC103",
            str(folder),
            f"the model (`{model_type}`) brings its own Python code, which acc does not run.",
            "use a model that Transformers itself implements",
        )
    if not _known(model_type):
        import transformers

        raise AccError.of(
            "ACC103",
            str(folder),
            f"Transformers {transformers.__version__} does not know the model type `{model_type}`.",
            "a newer Transformers may: pip install -U transformers",
        )
    try:
        config = checkpoint.config
    except Exception as error:  # configuration classes validate with whatever they like
        told = f"config.json is not a valid {model_type} configuration ({_line(error)})."
        raise AccError.of(
            "ACC102", str(folder / "config.json"), told, "compare it with the original model's"
        ) from error
    _check_kind(folder, config)
    if method := (raw.get("quantization_config") or {}).get("quant_method"):
        raise AccError.of(
            "ACC112",
            str(folder),
            f"the weights are already quantised ({method}).",
            "give the unquantised model; acc quantises for the target itself",
        )


def _raw_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        told = "the folder has no config.json, so it is not a Hugging Face model."
        ggufs = sorted(folder.glob("*.gguf"))
        hint = f"did you mean {ggufs[0]}?" if ggufs else "give the folder that holds config.json and model.safetensors"
        raise AccError.of("ACC102", str(folder), told, hint)
    try:
        raw = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        told = f"config.json cannot be read ({_line(error)})."
        raise AccError.of("ACC102", str(path), told, "download it again") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
        raise AccError.of("ACC102", str(path), "config.json does not say the model_type.", "download it again")
    return raw


def _known(model_type: Any) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def _check_kind(folder: Path, config: PretrainedConfig) -> None:
    """Refuse what is not a decoder-only text model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    stated = ", ".join(config.architectures or ())
    decoder = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in config.architectures or ())
    if config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or (stated and not decoder):
        raise AccError.of(
            "ACC104",
            str(folder),
            f"this is not a causal language model (`{stated or config.model_type}`).",
            "acc compiles decoder-only text models, such as LlamaForCausalLM",
        )


def check_shapes(checkpoint: Checkpoint) -> dict[str, str]:
    """The weights have the names and shapes that the config makes. Returns the tied names, each with its source."""
    wanted, ignored, ties = _expected(checkpoint)
    folder = checkpoint.folder
    stored = {name: checkpoint.shape(name) for name in checkpoint.names()}
    for name, found in stored.items():
        if name in wanted and found != wanted[name]:
            told = f"`{name}` should be {list(wanted[name])} and is {list(found)}"
            raise _contradiction(folder, told, "one of the two is from another model: download both again")
    missing = [name for name in wanted if name not in stored]
    if missing:
        more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
        told = f"`{missing[0]}` {list(wanted[missing[0]])}{more} not there"
        raise _contradiction(folder, told, "one of the two is from another model, or the weights were saved in part")
    extra = [name for name in stored if name not in wanted and not any(p.search(name) for p in ignored)]
    if extra:
        told = f"`{extra[0]}` {list(stored[extra[0]])} has no place in the model"
        raise _contradiction(folder, told, "check num_hidden_layers, the sizes and tie_word_embeddings in config.json")
    return ties


def _check_ties(checkpoint: Checkpoint, ties: Mapping[str, str]) -> None:
    """Tied tensors that are stored twice are equal, or one of them would silently be lost."""
    for name, source in ties.items():
        both = name in checkpoint.shards and source in checkpoint.shards
        if both and not checkpoint.read(name).equal(checkpoint.read(source)):
            told = f"`{name}` differs from `{source}`, with which it is said to be tied"
            raise _contradiction(checkpoint.folder, told, "set tie_word_embeddings to false in config.json")


def _contradiction(folder: Path, told: str, hint: str) -> AccError:
    return AccError.of("ACC109", str(folder), f"config.json contradicts the weights: {told}.", hint)


def _expected(checkpoint: Checkpoint) -> tuple[dict[str, tuple[int, ...]], list[re.Pattern[str]], dict[str, str]]:
    """The shapes that the model needs, patterns of names that old checkpoints may hold besides, and tied names.

    A tied tensor is wanted once, under the name that it is stored under.
    """
    import torch

    from acc.model import build

    layers = getattr(checkpoint.config, "num_hidden_layers", 1)
    if layers > len(checkpoint.shards):  # before a model of that depth is built
        told = f"num_hidden_layers is {layers}, with {len(checkpoint.shards)} tensors"
        raise _contradiction(checkpoint.folder, told, "one of the two is from another model: download both again")
    try:
        with torch.device("meta"):
            model = build(checkpoint.config_json)
    except AccError:
        raise
    except Exception as error:  # modelling code meets sizes that it never checks
        told = f"Transformers cannot build the model that config.json describes ({_line(error)})."
        raise AccError.of("ACC102", str(checkpoint.folder), told, "compare it with the original model's") from error
    stored = checkpoint.shards
    ties = dict(model.all_tied_weights_keys) if model.config.tie_word_embeddings else {}
    twins = {**ties, **{source: target for target, source in ties.items()}}
    wanted = {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if name in stored or twins.get(name) not in stored
    }
    # Rotary frequencies were stored by Transformers before 4.32 and are computed since.
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
    return wanted, [re.compile(pattern) for pattern in patterns], ties


def check_numbers(where: Path, name: str, tensor: torch.Tensor) -> None:
    """A tensor holds no NaN and no infinity; a few MiB are looked at at once."""
    if not tensor.is_floating_point():
        return
    flat = tensor.reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        chunk = flat[start : start + _CHUNK].float()
        # A NaN is both the least and the greatest; one pass without a mask is what makes this cheap.
        if not all(bound.isfinite() for bound in chunk.aminmax()):
            at = start + int((~chunk.isfinite()).nonzero()[0])
            raise AccError.of(
                "ACC108",
                str(where),
                f"`{name}` holds {float(flat[at])} at element {at} of {flat.numel()}: the weights are broken.",
                "download the model again; if it was trained or converted here, it diverged or overflowed there",
            )


def _line(error: BaseException) -> str:
    """The first line of an error's text, without its full stop."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200].rstrip(".")
