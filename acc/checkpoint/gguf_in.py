"""A GGUF file as input: decoded once into a Hugging Face folder, tensor by tensor.

Numbers: a block-quantised file is decoded to float32, since `scale * q + minimum` of two float16 takes more bits than
bfloat16 has; a file of bfloat16 or float16 matrices keeps that type when its float32 vectors lose nothing by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acc.checkpoint import file_digest
from acc.checkpoint.check import check_numbers
from acc.checkpoint.gguf_config import Family, config_of, family_of
from acc.checkpoint.gguf_header import Header, TensorInfo, contradiction, read_header
from acc.checkpoint.gguf_tokenizer import write_tokenizer
from acc.checkpoint.writing import all_or_nothing, fill
from acc.diag import AccError

if TYPE_CHECKING:
    import torch

_VERSION = 1
"""Raise it when the same file would be decoded otherwise: it is part of the folder's name in the cache."""
_CHUNK_BYTES = 32 << 20
"""Decoded bytes per chunk of rows."""
_EMBEDDING, _OUTPUT, _FREQUENCIES = "token_embd.weight", "output.weight", "rope_freqs.weight"


def convert(path: Path, cache: Path) -> Path:
    """The Hugging Face folder of a GGUF file, made once per content and kept in `cache`.

    Raises:
        AccError: ACC120 to ACC124 for a bad or unsupported file, ACC108 for broken weights, ACC501 or ACC502 if the
            cache cannot be written.
    """
    header = read_header(path)
    family = family_of(header)
    folder = cache / "gguf" / f"{file_digest(path, cache)[:32]}-{_VERSION}"
    if (folder / "config.json").is_file():
        return folder
    embedding, tied = _embedding(header)
    frequencies = header.tensors.get(_FREQUENCIES)
    config = config_of(
        header,
        family,
        tied=tied,
        dtype=_float_type(header),
        frequencies=None if frequencies is None else _values(header, frequencies).float(),
    )
    places = _places(header, config, embedding)
    with all_or_nothing(folder) as scratch:
        fill(scratch, config, _decoded(header, family, config, places))
        write_tokenizer(header, scratch)
    return folder


def _embedding(header: Header) -> tuple[TensorInfo, bool]:
    """The tensor to take for the embedding, and whether it serves as the output projection too.

    Some files of tied models store both ends, quantised differently. Then the two are one matrix up to rounding, and
    the finer one stands for both: read as untied, the model would have parameters that its parent never had.
    """
    import torch

    first, last = header.tensor(_EMBEDDING), header.tensors.get(_OUTPUT)
    if last is None:
        return first, True
    if last.shape != first.shape:
        return first, False
    # Two hundred rows tell: rounding to 4 bits moves a matrix by 8 % of its norm, another matrix is 140 % away.
    some = slice(0, None, max(1, first.shape[0] // 200))
    a, b = (_values(header, info, some).float() for info in (first, last))
    same = bool(torch.linalg.vector_norm(a - b) < 0.25 * torch.linalg.vector_norm(b))
    return (max(first, last, key=lambda info: info.bytes), True) if same else (first, False)


def _float_type(header: Header) -> str:
    """Torch's name of the number format of the decoded model (see the head of this file)."""
    import torch

    matrices = {info.type for info in header.tensors.values() if len(info.shape) > 1}
    name = {"BF16": "bfloat16", "F16": "float16"}.get(matrices.pop(), "float32") if len(matrices) == 1 else "float32"
    vectors = [info for info in header.tensors.values() if info.type == "F32" and info.name != _FREQUENCIES]
    for value in (_values(header, info) for info in vectors if name != "float32"):
        if not torch.equal(value.to(getattr(torch, name)).float(), value):
            return "float32"
    return name


def _places(header: Header, config: Mapping[str, Any], embedding: TensorInfo) -> dict[str, TensorInfo]:
    """For every tensor of the model, where the file holds it; the two must have the same tensors and shapes."""
    import torch
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    from acc.model import build

    try:
        with torch.device("meta"):
            model = build(config)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise contradiction(header, f"Transformers cannot build a model of its sizes ({error})") from error
    tied = config["tie_word_embeddings"]
    arch = next(key for key, value in MODEL_ARCH_NAMES.items() if value == header.architecture)
    names = get_tensor_name_map(arch, config["num_hidden_layers"])
    used, places = {_EMBEDDING, _FREQUENCIES, *([_OUTPUT] if tied else [])}, {}
    for name, tensor in model.state_dict().items():
        if tied and name in model.all_tied_weights_keys:
            continue
        stem, _, suffix = name.rpartition(".")
        info = header.tensor(f"{names.get_name(stem)}.{suffix}")
        if info.shape != tuple(tensor.shape):
            told = f"`{info.name}` should be {list(tensor.shape)} and is {list(info.shape)}"
            raise contradiction(header, told)
        used.add(info.name)
        places[name] = embedding if info.name == _EMBEDDING else info
    if extra := sorted(header.tensors.keys() - used):
        raise contradiction(header, f"`{extra[0]}` has no place in a {config['model_type']} model of its sizes")
    return places


def _decoded(
    header: Header, family: Family, config: Mapping[str, Any], places: Mapping[str, TensorInfo]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's tensors in its own order, decoded one at a time."""
    import torch

    heads = {".attn_q.": config["num_attention_heads"], ".attn_k.": config["num_key_value_heads"]}
    for name, info in places.items():
        value = _values(header, info)
        for mark, count in heads.items() if family.rotary_pairs else ():
            if mark in info.name:
                value = _halves(value, count)
        if family.norm_offset and info.name.endswith("norm.weight"):
            value = value.float() - family.norm_offset
        check_numbers(header.path, info.name, value)
        yield name, value.to(getattr(torch, config["dtype"]))


def _values(header: Header, info: TensorInfo, rows: slice = slice(None)) -> torch.Tensor:
    """A tensor, or some rows of it, decoded to float32 (F16 and BF16 stay as they are) a few rows at a time."""
    import numpy as np
    import torch
    from gguf import GGMLQuantizationType, dequantize

    raw = np.memmap(header.path, mode="r", offset=info.start, shape=(info.bytes,), dtype=np.uint8)
    packed = raw.reshape(info.rows, -1)[rows]
    plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    if info.type in plain:
        return torch.from_numpy(packed.copy()).view(plain[info.type]).reshape(-1, *info.shape[1:])
    out = torch.empty(len(packed), info.shape[-1])
    step = max(1, _CHUNK_BYTES // (4 * info.shape[-1]))
    try:
        for start in range(0, len(packed), step):
            chunk = dequantize(packed[start : start + step], GGMLQuantizationType[info.type])
            out[start : start + step] = torch.from_numpy(chunk)
    except NotImplementedError as error:
        told = f"tensor `{info.name}` is stored as {info.type}, which cannot be decoded."
        raise AccError.of("ACC122", str(header.path), told, "give a more usual quantisation of the model") from error
    return out.reshape(-1, *info.shape[1:])


def _halves(value: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of Q or K, per head, from rotary pairs (x0 y0 x1 y1 ...) to Transformers' halves (x0 x1 ... y0 y1 ...)."""
    return value.reshape(heads, -1, 2, *value.shape[1:]).transpose(1, 2).reshape(value.shape)
