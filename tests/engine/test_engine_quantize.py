"""Quantising through ggml: the same bytes as the reference where there is one, and an importance that counts."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from acc.backends.llamacpp.quantize import Quantizer, quantize_rows
from acc.diag import AccError

REFERENCE = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
K_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")


def back(name: str, data: bytes, shape: tuple[int, int]) -> np.ndarray:
    stored = np.frombuffer(data, np.uint8).reshape(shape[0], -1)
    values: np.ndarray = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[name])
    return values.reshape(shape)


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(37, 512)).astype(np.float32)


@pytest.mark.parametrize("name", REFERENCE)
def test_bytes_equal_the_reference(name: str, rows: np.ndarray) -> None:
    kind = gguf.GGMLQuantizationType[name]
    assert quantize_rows(name, rows) == gguf.quants.quantize(rows, kind).tobytes()


def test_k_types_are_as_long_and_as_exact_as_their_bits(rows: np.ndarray) -> None:
    errors = {}
    for name in K_TYPES:
        data = quantize_rows(name, rows)
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
        assert len(data) == rows.size // block * block_bytes
        errors[name] = float(np.sqrt(((back(name, data, (37, 512)) - rows) ** 2).mean()))
    order = ["Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K"]
    assert [*order] == sorted(order, key=errors.__getitem__)
    assert errors["Q4_K"] < 0.1 < errors["Q2_K"]


@pytest.mark.parametrize("name", ["Q4_K", "IQ4_XS", "Q4_0", "Q2_K"])
def test_important_columns_are_kept_better(name: str, rows: np.ndarray) -> None:
    importance = np.ones(512, np.float32)
    importance[::16] = 1000.0
    plain = back(name, quantize_rows(name, rows), (37, 512))
    weighted = back(name, quantize_rows(name, rows, importance), (37, 512))
    lost = {key: ((values - rows)[:, ::16] ** 2).mean() for key, values in (("plain", plain), ("weighted", weighted))}
    assert lost["weighted"] < 0.8 * lost["plain"]


def test_chunks_and_threads_do_not_change_the_bytes(rows: np.ndarray) -> None:
    with Quantizer(threads=1) as one:
        assert one.rows("Q4_K", rows) == b"".join(one.rows("Q4_K", rows[i : i + 1]) for i in range(37))
        assert one.rows("Q4_K", rows) == quantize_rows("Q4_K", rows)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("Q4_K", (4, 576), "blocks of 256 columns, and 576 is no multiple"),
        ("Q8_0", (4, 30), "blocks of 32 columns"),
        ("Q4_L", (4, 256), "is no type of the GGUF format"),
        ("IQ2_XXS", (4, 256), "needs an importance per column"),
    ],
)
def test_what_cannot_be_stored_is_refused_and_the_next_tensor_works(
    name: str, shape: tuple[int, int], words: str
) -> None:
    with pytest.raises(AccError, match=words) as error:
        quantize_rows(name, np.zeros(shape, np.float32))
    assert error.value.diagnostics[0].code == "LC057"
    assert len(quantize_rows("Q8_0", np.zeros((1, 32), np.float32))) == 34


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(bad: float) -> None:
    values = np.zeros((4, 256), np.float32)
    values[2, 7] = bad
    with pytest.raises(AccError, match="not all finite"):
        quantize_rows("Q4_K", values)
    with pytest.raises(AccError, match="importances"):
        quantize_rows("Q4_K", np.zeros((4, 256), np.float32), values[2])
