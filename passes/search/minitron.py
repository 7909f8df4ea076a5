"""`minitron`: the baseline of uniform widths (Muralidharan et al., arXiv 2407.14679): enumerate, then compare a few."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from acc.ir import Arch, ModelIR
from acc.passes.search import choose
from acc.passes.search.evolve import Picked
from acc.passes.search.puzzle import given_limits, task, told
from acc.passes.search.space import SIZES, Choice, Space, sizes_of
from acc.passes.search.study import Study
from acc.passes_api import Context, Pass, PassResult

NOTHING = Choice(0, 0, 0)
"""A dropped layer."""


class Minitron(Pass):
    """One FFN width, head count and stream width for all layers, and a number of layers, under every limit.

    Of the candidates that fit, the largest ones by parameters are compared by the KL of the whole model; layers are
    dropped from the second last one downwards, the last one being needed. Use it behind `order{method=absmean}`.

    Options:
        tpot, ttft, memory, throughput: limits in place of the target's, as text: `8ms`, `0.7x`, `6GiB`.
        margin: what predictions must stay below the limits, as a fraction (their own band if that is smaller).
        compared: candidates that are compared.
        tokens: to compare them on; length: tokens per sample; stride: logits at every so many positions.
        ffn, heads, hidden: how many sizes below the whole one to offer.
        depth: least share of the layers that stays.
        fit: tokens of the refit behind a narrower stream.
        data: text, JSONL or Parquet files; the corpus inside the package if empty.
    """

    name = "minitron"
    kind = "search"
    needs = ("parent", "moments", "orders")

    tpot: str = ""
    ttft: str = ""
    memory: str = ""
    throughput: str = ""
    margin: float = 0.02
    compared: int = 5
    tokens: int = 4096
    length: int = 512
    stride: int = 2
    ffn: int = 8
    heads: int = 3
    hidden: int = 2
    depth: float = 0.6
    fit: int = 16384
    data: tuple[str, ...] = ()

    def run(self, ir: ModelIR, ctx: Context) -> PassResult:
        limits = given_limits(self)
        budget, space = task(ir, ctx, limits, self.margin, ffn=self.ffn, heads=self.heads, hidden=self.hidden)
        whole = ir.with_arch(Arch())
        fitting = {
            (hidden, picked): whole.resize(sizes_of(whole, picked, hidden)).parameters()
            for hidden, picked in candidates(space, choose.droppable(space, self.depth))
            if budget.fits(picked, hidden)
        }
        if not fitting:
            raise choose.no_fit(budget, space, self.depth, ctx.target.name if ctx.target else self.name)
        largest = sorted(fitting, key=lambda one: -fitting[one])[: self.compared]
        study = Study.of(
            ir, ctx, tokens=self.tokens, length=self.length, stride=self.stride, fit=self.fit, data=self.data
        )
        kl = {one: study.kl(study.scorer, one[1], one[0]) for one in largest}
        hidden, picked = min(largest, key=kl.__getitem__)
        sizes = sizes_of(whole, picked, hidden)
        facts = {
            "candidates": len(fitting),
            "tokens_spent": study.scorer.tokens,
            "predicted": told(budget, picked, hidden),
            "kl_nats": kl[hidden, picked],
            "compared": [
                {"arch": choose.described(p, h), "parameters": fitting[h, p], "kl_nats": kl[h, p]} for h, p in largest
            ],
            "sizes": sizes,
        }
        return PassResult(ir.resize(sizes), facts)


def candidates(space: Space, most: int) -> Iterator[tuple[int, Picked]]:
    """Every uniform architecture: the width of the stream, and the choice of each layer."""
    shared = set.intersection(*(set(choices) for choices in space.layers))
    parts = [sorted({size(choice) for choice in shared} - {0}, reverse=True) for size in SIZES.values()]
    for hidden, (ffn, groups, queries), gone in itertools.product(
        space.hidden, itertools.product(*parts), range(most + 1)
    ):
        choice = Choice(groups, queries, ffn)
        if choice in shared and (not gone or NOTHING in shared):
            yield hidden, without(space, choice, gone)


def without(space: Space, choice: Choice, gone: int) -> Picked:
    """The same choice for all layers, with `gone` of them dropped, from the second last one downwards."""
    depth = len(space.layers)
    dropped = range(depth - 1 - gone, depth - 1)
    return tuple(NOTHING if index in dropped else choice for index in range(depth))
