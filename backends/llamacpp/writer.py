"""GGUF files through `gguf.GGUFWriter`: metadata, then tensor by tensor from the checkpoint; memory is one tensor.

The size of a file is known before it is written: the same writer runs with a sink that counts bytes.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from acc.backend_api import TensorPlan
from acc.backends.llamacpp import types, vocab
from acc.backends.llamacpp.hosts import Choice, choose, rope, window
from acc.backends.llamacpp.slots import Read, Slot, Values, gather, slots
from acc.ir import ModelIR
from acc.passes_api import Progress

if TYPE_CHECKING:
    import gguf
    import numpy.typing as npt

Importance = Callable[[Slot], "Values | None"]
"""Mean square of each input column of a slot, or None where it was not measured."""
Pack = Callable[[str, "Values", "Values | None"], "npt.NDArray[Any]"]


@dataclass(frozen=True)
class Draft:
    """A file that could be written: everything but the values.

    Attributes:
        tensors: plan per slot, in the same order.
        tokenizer: the folder that the vocabulary is taken from, or None for a file without one.
    """

    ir: ModelIR
    quant: str
    choice: Choice
    slots: tuple[Slot, ...]
    tensors: tuple[TensorPlan, ...]
    tokenizer: Path | None

    def file_bytes(self) -> int:
        """The exact size of the file: header, metadata and tensor table as the writer packs them, then the data."""
        writer = self._writer()
        sink = _Counter()
        # The writer's own way to the file, with a sink in the file's place.
        writer.fout, writer.state = [cast(Any, sink)], _empty_state()
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        alignment = writer.data_alignment
        return _pad(sink.tell(), alignment) + sum(_pad(tensor.bytes, alignment) for tensor in self.tensors)

    def write(self, out: Path, read: Read, importance: Importance, progress: Progress) -> None:
        """Write the file to `out`, replacing it only when it is whole."""
        with _packer(self.tensors) as pack:

            def packed(index: int, slot: Slot, plan: TensorPlan) -> npt.NDArray[Any]:
                progress(index, len(self.slots), slot.name)
                return pack(plan.type, gather(slot, self.ir, self.choice.held, read), importance(slot))

            self.write_packed(out, packed)

    def write_packed(self, out: Path, packed: Callable[[int, Slot, TensorPlan], npt.NDArray[Any]]) -> None:
        """Write the file with the tensor data that `packed` gives for each slot, by its number, as stored."""
        writer = self._writer()
        partial = out.with_name(out.name + ".partial")
        try:
            writer.write_header_to_file(partial)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for index, (slot, plan) in enumerate(zip(self.slots, self.tensors, strict=True)):
                writer.write_tensor_data(packed(index, slot, plan))
            writer.close()
            partial.replace(out)
        finally:
            writer.close()
            partial.unlink(missing_ok=True)

    def _writer(self) -> gguf.GGUFWriter:
        import gguf

        writer = gguf.GGUFWriter(None, self.choice.host.arch)
        _add_metadata(writer, self)
        for plan in self.tensors:
            kind = gguf.GGMLQuantizationType[plan.type]
            writer.add_tensor_info(plan.name, plan.shape, np.dtype(np.float32), plan.bytes, raw_dtype=kind)
        return writer


def draft(ir: ModelIR, quant: str, tokenizer: Path | None) -> Draft:
    """What would be written for an Arch in a number format. Raises AccError where no host holds it."""
    choice = choose(ir, types.mix(quant).block).require()
    found = tuple(slots(ir, choice))
    tensors = tuple(_tensor_plan(slot, quant, ir.depth()) for slot in found)
    return Draft(ir, quant, choice, found, tensors, tokenizer)


def _tensor_plan(slot: Slot, quant: str, depth: int) -> TensorPlan:
    wanted = "F32"
    if len(slot.shape) > 1:
        wanted = types.wanted(quant, slot.kind, slot.columns, slot.layer, depth)
    kept = types.stored(wanted, slot.columns)
    weights, size = types.block(kept)
    # Zeros are exact in every type: a padding tensor loses nothing by its type.
    return TensorPlan(
        slot.name, slot.shape, kept, kept if slot.empty else wanted, math.prod(slot.shape) // weights * size
    )


# Metadata ------------------------------------------------------------------------------------------------------------


def _add_metadata(writer: gguf.GGUFWriter, made: Draft) -> None:
    ir, config = made.choice.held, made.ir.config
    shape = ir.model_shape()
    layers = [layer for layer in shape.layers if not layer.dropped]

    def sizes(values: Sequence[int]) -> Any:
        return list(values) if made.choice.host.per_layer else values[0]

    writer.add_file_type(types.mix(made.quant).file_type)
    writer.add_quantization_version(2)
    writer.add_block_count(len(layers))
    writer.add_context_length(window(config) or int(config.get("max_position_embeddings") or 2048))
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(sizes([layer.ffn for layer in layers]))
    writer.add_head_count(sizes([layer.heads for layer in layers]))
    writer.add_head_count_kv(sizes([layer.kv_heads for layer in layers]))
    writer.add_layer_norm_rms_eps(float(config.get("rms_norm_eps", 1e-6)))
    writer.add_vocab_size(shape.vocab)
    # Always explicit: the engine's default is hidden size / heads of layer 0, wrong once either is cut.
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    _add_rope(writer, config, shape.head_dim)
    _add_family(writer, made)
    vocab.add(writer, made.tokenizer, shape.vocab)
    _add_name(writer, config)


def _add_rope(writer: gguf.GGUFWriter, config: Any, head_dim: int) -> None:
    import gguf

    found = rope(config)
    part = float(found.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    writer.add_rope_dimension_count(int(head_dim * part))
    writer.add_rope_freq_base(float(found["rope_theta"]))
    kind, factor = found["rope_type"], float(found.get("factor") or 1.0)
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(factor)
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(factor)
        original = found.get("original_max_position_embeddings") or config["max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(int(original))
        writer.add_rope_scaling_yarn_beta_fast(float(found.get("beta_fast") or 32))
        writer.add_rope_scaling_yarn_beta_slow(float(found.get("beta_slow") or 1))
        if found.get("attention_factor"):
            # The engine multiplies by the usual 0.1 ln(factor) + 1 itself.
            writer.add_rope_scaling_attn_factors(float(found["attention_factor"]) / (0.1 * math.log(factor) + 1))


def _add_family(writer: gguf.GGUFWriter, made: Draft) -> None:
    """What an own architecture computes beyond the common decoder."""
    config = made.ir.config
    if made.choice.host.arch == "granite":
        writer.add_embedding_scale(float(config.get("embedding_multiplier", 1.0)))
        writer.add_residual_scale(float(config.get("residual_multiplier", 1.0)))
        writer.add_attention_scale(float(config.get("attention_multiplier", 1.0)))
        writer.add_logit_scale(float(config.get("logits_scaling", 1.0)))
    if made.choice.host.arch == "gemma3":
        writer.add_sliding_window(int(config["sliding_window"]))
        local = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
        writer.add_rope_freq_base_swa(float(local.get("rope_theta") or config.get("rope_local_base_freq") or 10000.0))
        if softcap := config.get("final_logit_softcapping"):
            writer.add_final_logit_softcapping(float(softcap))


def _add_name(writer: gguf.GGUFWriter, config: Any) -> None:
    """The model's name, unless the engine would look for tokens by it that are not there (llama-vocab.cpp, Phi-3)."""
    name = Path(str(config.get("_name_or_path") or "")).name or str(config.get("model_type", "model"))
    tokens = writer.kv_data[0].get("tokenizer.ggml.tokens")
    known = set(tokens.value) if tokens else set()
    looks = re.search("phi-?3", name.lower()) and tokens
    if not looks or {"</s>", "<unk>", "<s>", "<|endoftext|>"} <= known:
        writer.add_name(name)


# Values --------------------------------------------------------------------------------------------------------------


@contextmanager
def _packer(tensors: Sequence[TensorPlan]) -> Iterator[Pack]:
    """A function that packs values into a type; ggml itself does it, in a child process, where a type needs it."""
    from acc.backends.llamacpp.quantize import Quantizer

    plain = {"F32": np.float32, "F16": np.float16}
    quantizes = any(tensor.type not in plain for tensor in tensors)
    with Quantizer() if quantizes else nullcontext() as quantizer:

        def pack(name: str, value: Values, importance: Values | None) -> npt.NDArray[Any]:
            if quantizer is None or name in plain:
                return np.ascontiguousarray(value, plain[name])
            rows = quantizer.rows(name, np.ascontiguousarray(value, np.float32), importance)
            return np.frombuffer(rows, np.uint8)

        yield pack


class _Counter(io.RawIOBase):
    """A sink that counts what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def write(self, data: Any) -> int:
        self.count += len(data)
        return len(data)

    def tell(self) -> int:
        return self.count


def _empty_state() -> Any:
    from gguf.gguf_writer import WriterState

    return WriterState.EMPTY


def _pad(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
