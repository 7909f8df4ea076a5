"""`puzzle`: replace-one-block scores, an integer program over the cost model, evolution on whole-model KL."""

from __future__ import annotations

from dataclasses import dataclass

from acc.fingerprint import named_files
from acc.ir import ModelIR
from acc.passes.search import choose
from acc.passes.search.blockscores import BlockScores
from acc.passes.search.evolve import Evolved, Picked, evolve
from acc.passes.search.limited import LimitedSearch, told
from acc.passes.search.limits import Budget
from acc.passes.search.space import Space, sizes_of
from acc.passes.search.study import Study
from acc.passes_api import Context, PassResult


@dataclass(frozen=True)
class Start:
    """An answer of the integer program: in which space, with what sum of block scores and what KL as a whole model."""

    hidden: int
    space: Space
    picked: Picked
    score: float
    kl: float


class Puzzle(LimitedSearch):
    """Per layer the FFN width, KV groups and presence, and the width of the stream, under every limit.

    A quarter as many tokens as scores take, others, stop the evolution.

    Options, beside those of every search under limits:
        widths: FFN widths that are run per layer; the others are interpolated.
        evolve: trials of the evolution.
    """

    name = "puzzle"
    resumes = True

    widths: int = 3
    evolve: int = 40

    def run(self, ir: ModelIR, ctx: Context) -> PassResult:
        where = ctx.target.name if ctx.target else self.name
        budget, space = self.task(ir, ctx)
        choose.refuse_hopeless(budget, space, self.depth, where)
        study = self.study(ir, ctx)
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
