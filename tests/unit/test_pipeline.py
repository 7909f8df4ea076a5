"""Pipelines as text: round trips, and the exact words of every mistake."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from passes_for_tests import Note, Options, registered

from acc import pipeline, registry
from acc.diag import AccError


@pytest.fixture(autouse=True, scope="module")
def _passes() -> Iterator[None]:
    with registered():
        yield


texts = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=12)


@given(
    st.builds(
        Options,
        whole=st.integers(),
        part=st.floats(allow_nan=False),
        text=texts,
        maybe=st.none() | texts,
        flag=st.booleans(),
        many=st.lists(texts, max_size=3).map(tuple),
        sizes=st.lists(st.integers(), max_size=3).map(tuple),
        one_of=st.sampled_from(["left", "right"]),
    )
)
def test_every_pass_survives_the_round_trip(one: Options) -> None:
    assert pipeline.parse(pipeline.format([one, Note()])) == (one, Note())


def test_only_what_differs_from_the_defaults_is_written() -> None:
    assert pipeline.spec(Options()) == "options"
    assert pipeline.spec(Options(whole=2, flag=True, many=("a", "b c"))) == 'options{whole=2,flag=true,many=[a "b c"]}'


@pytest.mark.parametrize(
    "text",
    [
        "options{whole=3,part=1e-3},note",
        "options{whole=3 part=1e-3} , note",
        "  options {\n  whole = 3\n  part = 0.001\n},\nnote",
        "options{whole=3,part=.001},note",
    ],
)
def test_commas_spaces_and_lines_are_alike(text: str) -> None:
    assert pipeline.parse(text) == (Options(whole=3, part=0.001), Note())


def test_a_name_alone_is_true_and_none_is_none() -> None:
    (one,) = pipeline.parse('options{flag maybe="none" one-of=right}')
    assert one == Options(flag=True, maybe="none", one_of="right")
    (other,) = pipeline.parse("options{maybe=none}")
    assert other == Options()


MISTAKES = {
    "note,opptions": """\
error[ACC301]: pipeline: unknown pass `opptions`

    note,opptions
         ^^^^^^^^

hint: did you mean `options`?""",
    "options{hole=3}": """\
error[ACC311]: pipeline: pass `options` has no option `hole`

    options{hole=3}
            ^^^^

hint: did you mean `whole`?""",
    "options{whole=much}": """\
error[ACC312]: pipeline: option `whole` of `options` is a whole number, not `much`

    options{whole=much}
                  ^^^^""",
    "options{sizes=[1 two]}": """\
error[ACC312]: pipeline: option `sizes` of `options` is a list `[...]` of which each is a whole number, not `[1 two]`

    options{sizes=[1 two]}
                  ^^^^^^^""",
    "options{one-of=up}": """\
error[ACC312]: pipeline: option `one-of` of `options` is one of `left`, `right`, not `up`

    options{one-of=up}
                   ^^""",
    "options{whole=1 whole=2}": """\
error[ACC313]: pipeline: option `whole` is given twice

    options{whole=1 whole=2}
                    ^^^^^""",
    'options{text="open}': """\
error[ACC310]: pipeline: the quoted string has no end

    options{text="open}
                 ^^^^^^""",
    "options{whole=1": """\
error[ACC310]: pipeline: expected an option or `}`

    options{whole=1
                   ^""",
    "options{whole=}": """\
error[ACC310]: pipeline: expected a value

    options{whole=}
                  ^""",
    "note note": """\
error[ACC310]: pipeline: expected a comma between passes

    note note
         ^^^^""",
    "note,": """\
error[ACC310]: pipeline: expected the name of a pass

    note,
         ^""",
    "note,\n  options{hole},\nnote": """\
error[ACC311]: pipeline: pass `options` has no option `hole`

      options{hole},
              ^^^^

hint: did you mean `whole`?""",
    "note{x=1,y}": """\
error[ACC311]: pipeline: pass `note` has no option `x`

    note{x=1,y}
         ^

hint: known: text""",
}


@pytest.mark.parametrize("text", list(MISTAKES))
def test_mistakes_are_marked_in_the_text(text: str) -> None:
    with pytest.raises(AccError) as caught:
        pipeline.parse(text)
    assert str(caught.value) == MISTAKES[text]


def test_every_effort_parses_and_prints_back() -> None:
    assert list(pipeline.efforts()) == ["quick", "normal", "thorough"]
    for text in pipeline.efforts().values():
        passes = pipeline.parse(text)
        assert pipeline.parse(pipeline.format(passes)) == passes
    with pytest.raises(AccError, match=r"ACC314.*unknown effort `quik`\n\nhint: did you mean `quick`"):
        pipeline.effort("quik")


def test_every_installed_pass_prints_and_parses_back() -> None:
    names = registry.passes().names()
    assert names, "no passes are installed: pip install -e ."
    for name in names:
        cls = registry.passes().load(name)
        assert pipeline.parse(pipeline.spec(cls())) == (cls(),)
        assert all(kind == kind.strip() for kind in (*cls.needs, *cls.gives))
