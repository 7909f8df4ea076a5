"""`minitron`: the baseline of uniform widths (Muralidharan et al., arXiv 2407.14679): enumerate, then compare a few."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from acc.ir import Arch, ModelIR
from acc.passes.search import choose
from acc.passes.search.evolve import Picked
from acc.passes.search.limited import LimitedSearch, told
from acc.passes.search.space import SIZES, Choice, Space, sizes_of
from acc.passes_api import Context, PassResult

NOTHING = Choice(0, 0, 0)
"""A dropped layer."""


class Minitron(LimitedSearch):
    """One FFN width, head count and stream width for all layers, and a number of layers, under every limit.

    Of the candidates that fit, the largest ones by parameters are compared by the KL of the whole model; layers are
    dropped from the second last one downwards, the last one being needed. Use it behind `order{method=absmean}`.

    Options, beside those of every search under limits:
        compared: candidates that are compared.
    """

    name = "minitron"

    compared: int = 5

    def run(self, ir: ModelIR, ctx: Context) -> PassResult:
        budget, space = self.task(ir, ctx)
        whole = ir.with_arch(Arch())
        fitting = {
            (hidden, picked): whole.resize(sizes_of(whole, picked, hidden)).parameters()
            for hidden, picked in candidates(space, choose.droppable(space, self.depth))
            if budget.fits(picked, hidden)
        }
        if not fitting:
            raise choose.no_fit(budget, space, self.depth, ctx.target.name if ctx.target else self.name)
        largest = sorted(fitting, key=lambda one: -fitting[one])[: self.compared]
        study = self.study(ir, ctx)
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
