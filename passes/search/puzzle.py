"""`puzzle`: replace-one-block scores, an integer program over the cost model, evolution on whole-model KL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from acc.diag import AccError
from acc.fingerprint import named_files
from acc.ir import Arch, ModelIR
from acc.passes.search import choose
from acc.passes.search.blockscores import BlockScores
from acc.passes.search.evolve import Evolved, Picked, evolve
from acc.passes.search.limits import NAMES, Budget, figure
from acc.passes.search.space import Space, sizes_of, space_of
from acc.passes.search.study import Study
from acc.passes_api import Context, Pass, PassResult
from acc.target import Limit


@dataclass(frozen=True)
class Start:
    """An answer of the integer program: in which space, with what sum of block scores and what KL as a whole model."""

    hidden: int
    space: Space
    picked: Picked
    score: float
    kl: float


class Puzzle(Pass):
    """Per layer the FFN width, KV groups and presence, and the width of the stream, under every limit.

    Options:
        tpot, ttft, memory, throughput: limits in place of the target's, as text: `8ms`, `0.7x`, `6GiB`.
        margin: what predictions must stay below the limits, as a fraction (their own band if that is smaller).
        tokens: for block scores; a quarter as many others stop the evolution.
        length: tokens per sample.
        stride: logits are compared at every so many positions.
        ffn, heads, hidden: how many sizes below the whole one to offer.
        widths: FFN widths that are run per layer; the others are interpolated.
        depth: least share of the layers that stays.
        fit: tokens of the refit behind a narrower stream.
        evolve: trials of the evolution.
        data: text, JSONL or Parquet files; the corpus inside the package if empty.
    """

    name = "puzzle"
    kind = "search"
    needs = ("parent", "moments", "orders")
    resumes = True

    tpot: str = ""
    ttft: str = ""
    memory: str = ""
    throughput: str = ""
    margin: float = 0.02
    tokens: int = 4096
    length: int = 512
    stride: int = 2
    ffn: int = 8
    heads: int = 3
    hidden: int = 2
    widths: int = 3
    depth: float = 0.6
    fit: int = 16384
    evolve: int = 40
    data: tuple[str, ...] = ()

    def run(self, ir: ModelIR, ctx: Context) -> PassResult:
        where = ctx.target.name if ctx.target else self.name
        budget, space = task(
            ir, ctx, given_limits(self), self.margin, ffn=self.ffn, heads=self.heads, hidden=self.hidden
        )
        choose.refuse_hopeless(budget, space, self.depth, where)
        study = Study.of(
            ir, ctx, tokens=self.tokens, length=self.length, stride=self.stride, fit=self.fit, data=self.data
        )
        # Scores do not depend on the limits: another limit, or the next turn of the closed loop, finds them done.
        known = [ir.artifacts[kind].digest for kind in self.needs]
        data = sorted(named_files(self).values())
        depends = ("scores", *known, self.tokens, self.length, self.stride, space.hidden[0], data)
        partial = ctx.shared(*depends) / "scores.json"
        scores = BlockScores(study.ir, space, study.scorer, study.library(space.hidden[0]), self.widths, partial)
        scores.fill(ctx.progress)
        starts = self.starts(study, budget, space, scores)
        if not starts:
            raise choose.no_fit(budget, space, self.depth, where)
        best = min(starts, key=lambda start: start.kl)
        final = self.polish(study, budget, scores, best, ctx)
        sizes = sizes_of(study.ir, final.picked, best.hidden)
        facts = {
            "scoring_tokens": study.scorer.samples.numel(),
            "tokens_spent": study.scorer.tokens + study.checker.tokens,
            "predicted": told(budget, final.picked, best.hidden),
            "kl_nats": final.kl,
            "check_kl_nats": final.check,
            "evolution": {"trials": final.trials, "ended": final.ended, "start_kl_nats": best.kl},
            "starts": [
                {"arch": choose.described(one.picked, one.hidden), "score_nats": one.score, "kl_nats": one.kl}
                for one in starts
            ],
            "block_scores_nats": scores.run,
            "sizes": sizes,
        }
        return PassResult(ir.resize(sizes), facts)

    def starts(self, study: Study, budget: Budget, space: Space, scores: BlockScores) -> list[Start]:
        """The best sums of block scores for every width of the stream, with and without dropped layers."""
        found: dict[tuple[int, Picked], Start] = {}
        most = choose.droppable(space, self.depth)
        for hidden in space.hidden:
            for narrowed in choose.restrictions(space):
                for drops in sorted({0, most // 2, most}):
                    picked = choose.best(budget, narrowed, hidden, scores.score, drops)
                    if picked and (hidden, picked) not in found:
                        total = sum(scores.score(index, choice) for index, choice in enumerate(picked))
                        kl = study.kl(study.scorer, picked, hidden)
                        found[hidden, picked] = Start(hidden, narrowed, picked, total, kl)
        return list(found.values())

    def polish(self, study: Study, budget: Budget, scores: BlockScores, start: Start, ctx: Context) -> Evolved:
        """Evolution from one start, under the same limits."""
        most = choose.droppable(start.space, self.depth)

        def fits(picked: Picked) -> bool:
            return sum(choice.dropped for choice in picked) <= most and budget.fits(picked, start.hidden)

        return evolve(
            start.picked,
            start.space,
            fits=fits,
            score=scores.score,
            judge=lambda picked: study.kl(study.scorer, picked, start.hidden),
            check=lambda picked: study.kl(study.checker, picked, start.hidden),
            trials=self.evolve,
            seed=ctx.seed,
            progress=ctx.progress,
        )


def given_limits(one: Pass) -> list[Limit]:
    """The limits that a search was given as options. Raises AccError ACC401 or ACC402."""
    given = {name: getattr(one, name) for name in NAMES}
    return [Limit.parse(name, text, f"{one.name}{{{name}}}") for name, text in given.items() if text]


def task(
    ir: ModelIR, ctx: Context, limits: Sequence[Limit], margin: float, *, ffn: int, heads: int, hidden: int
) -> tuple[Budget, Space]:
    """The limits (the target's, with others in place of those of the same name), and the space that the engine allows.

    Raises:
        AccError: ACC432 without any limit, ACC434 without a target.
    """
    if ctx.target is None or ctx.backend is None:
        hint = "give --target; `acc ls targets` lists them"
        raise AccError.of("ACC434", "target", "a search under limits needs a target and its engine", hint)
    target = ctx.target.with_limits(limits)
    table = ir.artifacts.get("table")
    model = ctx.backend.cost_model(ctx.path(table) if table else None, ir, target)
    budget = Budget.of(model, target.workload, ir.with_arch(Arch()).model_shape(), target.limits, margin)
    space = space_of(ir, ctx.backend.check(ir, target).grid, ffn=ffn, heads=heads, hidden=hidden)
    return budget, space


def told(budget: Budget, picked: Picked, hidden: int) -> Mapping[str, Any]:
    """Each limit, what is predicted of parent and child, and the room that is left, as a fraction."""
    whole, cut = budget.model.predict(budget.parent, budget.workload), budget.costs(picked, hidden)
    excess = budget.excess(picked, hidden)
    return {
        limit.name: {
            "limit": limit.value,
            "parent": figure(whole, limit.name).value,
            **asdict(figure(cut, limit.name)),
            "room": -excess[limit.name],
        }
        for limit in budget.limits
    }
