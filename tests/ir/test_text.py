"""The text form: prints and parses back exactly, with errors that name the line."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tiny_configs import VARIANTS, traced

from acc import text
from acc.diag import AccError
from acc.ir import Arch, Artifact, Dim, ModelIR, Tensor


@pytest.mark.parametrize("variant", VARIANTS)
def test_round_trip(variant: str) -> None:
    ir = traced(variant)
    arch = Arch({"ffn.0": 5, "attn.1": 0, "ffn.2": 20}, {"ffn.0": (0, 1, 2, 7, 19), "attn.1": ()})
    ir = ir.with_arch(arch).with_artifacts(weights=Artifact("/some where/#1", "ab"), moments=Artifact("k/m", "k/m"))
    printed = text.format(ir)
    assert text.parse(printed) == ir
    assert text.format(text.parse(printed)) == printed
    assert ModelIR.from_json(json.loads(json.dumps(ir.to_json()))) == ir


def test_unusual_names_and_shapes() -> None:
    dims = {name: Dim(name, "other", 2, "a path", "pinned", 'say "no" # never') for name in ("1", "a b", "x*y", "é")}
    tensor = Tensor("t, [0]", ((("1", "a b"), ()), (), (("x*y",), ("é",))), "F32", ("1",), ("#2", "->"))
    ir = ModelIR("f", {"k # \n": {"a": [1.5, None, "# = "]}}, dims, {tensor.name: tensor})
    assert text.parse(text.format(ir)) == ir


def test_without_ops_and_with_comments() -> None:
    ir = traced("llama")
    printed = text.format(ir, ops=False)
    assert text.parse(printed.replace("dim hidden", "# a comment\ndim hidden")) == replace(ir, ops=())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("dimm x : ffn = 3", "starts with `dimm`"),
        ("dim x : fnn = 3", "unknown role or state: `fnn`"),
        ("dim x : ffn = three", "has `three` where a size should stand"),
        ("dim x : ffn =", "ends where a size should stand"),
        ("dim x : ffn = 3 in a free why more", "has `more` where nothing more should stand"),
        ("dim hidden : hidden = 3", "`hidden` stands here a second time"),
        ("tensor t F32 [hidden", "ends where `,` should stand"),
        ("tensor t F32 [hidden hidden]", "has `hidden` where `,` should stand"),
        ('tensor t F32 [hidden] if "', "cannot read '\"'"),
        ("keep hidden = 3-x", "has `3-x` where indices such as"),
        ("op a = b(c) -> 3", "has `3` where `[` should stand"),
        ("  key = {", "the value of `key` is not JSON"),
    ],
)
def test_errors_name_the_line(line: str, message: str) -> None:
    with pytest.raises(AccError) as caught:
        text.parse(f"model llama\ndim hidden : hidden = 24\n{line}\n")
    (diagnostic,) = caught.value.diagnostics
    assert (diagnostic.code, diagnostic.where) == ("ACC220", "line 3")
    assert message in diagnostic.message


def test_a_text_without_a_model() -> None:
    with pytest.raises(AccError, match="has no `model` line"):
        text.parse("dim hidden : hidden = 24\n")
