"""Replace-one-block scores: KL of the parent with one block changed (Puzzle, arXiv 2411.19146, section 4)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from acc.ir import ModelIR
from acc.passes.library import Library
from acc.passes.search.scoring import Scorer
from acc.passes.search.space import Choice, Space, layer_sizes
from acc.passes_api import Progress
from acc.store import atomic

LEAST = 1e-7
"""KL and lost energy are taken to be at least this, so that they have a logarithm."""


class BlockScores:
    """KL in nats of every choice of every layer: that of its attention plus that of its MLP, or of the layer left out.

    FFN widths between those that were run are read off a line through them, log KL against the log of the share of the
    output energy that the cut loses, which the moments give for nothing.

    Args:
        widths: FFN widths below the whole one that are run per layer.
        partial: a file of scores so far, for a search that is resumed.
    """

    def __init__(self, ir: ModelIR, space: Space, scorer: Scorer, library: Library, widths: int, partial: Path) -> None:
        self.ir, self.space, self.scorer, self.library, self.widths = ir, space, scorer, library, widths
        self.partial = partial
        self.run: dict[str, float] = json.loads(partial.read_text("utf-8")) if partial.is_file() else {}
        self.table: list[dict[Choice, float]] = []

    def fill(self, progress: Progress) -> None:
        """Run what is missing."""
        depth = len(self.space.layers)
        for index, choices in enumerate(self.space.layers):
            progress(index, depth, f"scores of layer {index}")
            attention = {
                part: self._part(index, Choice(*part, choices[0].ffn))
                for part in {choice.attention for choice in choices if not choice.dropped}
            }
            ffn = self._ffn(index, sorted({choice.ffn for choice in choices if not choice.dropped}))
            self.table.append(
                {
                    choice: self._dropped(index) if choice.dropped else attention[choice.attention] + ffn[choice.ffn]
                    for choice in choices
                }
            )
        progress(depth, depth)

    def score(self, index: int, choice: Choice) -> float:
        """The score of a choice of a layer."""
        return self.table[index][choice]

    def _ffn(self, index: int, widths: list[int]) -> dict[int, float]:
        whole = self.space.layers[index][0]

        def part(width: int) -> float:
            return self._part(index, Choice(whole.groups, whole.queries, width))

        inner = [width for width in widths if 0 < width < whole.ffn]
        count = min(self.widths, len(inner))
        ran = {inner[round((at + 0.5) * len(inner) / count - 0.5)] for at in range(count)}
        found = {width: part(width) for width in {*ran, *(w for w in widths if w in (0, whole.ffn))}}
        if len(ran) < len(inner):
            found |= self._interpolated(index, found, [width for width in inner if width not in ran])
        return found

    def _interpolated(self, index: int, found: dict[int, float], missing: list[int]) -> dict[int, float]:
        points = sorted((self._lost(index, width), math.log(max(kl, LEAST))) for width, kl in found.items() if kl)
        if len(points) == 1:  # KL in proportion to the lost energy
            points.append((points[0][0] + 1, points[0][1] + 1))
        at, kl = np.array(points).T
        result = {}
        for width in missing:
            lost = self._lost(index, width)
            slope = (kl[1] - kl[0]) / (at[1] - at[0]) if at[1] > at[0] else 1.0
            value = kl[0] + slope * (lost - at[0]) if lost < at[0] else float(np.interp(lost, at, kl))
            result[width] = math.exp(value)
        return result

    def _lost(self, index: int, width: int) -> float:
        """Log of the share of output energy that an FFN width loses."""
        if not width:
            return 0.0
        whole = self.space.layers[index][0]
        sizes = layer_sizes(self.ir, index, Choice(whole.groups, whole.queries, width))
        dim = f"ffn.{index}"
        tensors = [t for t in self.scorer.masked.consumers_of(index) if any(dim in segment for segment in t.axes[1])]
        return math.log(max(LEAST, max(self.library.error(sizes, tensor) for tensor in tensors)))

    def _part(self, index: int, choice: Choice) -> float:
        """KL with one sub-block changed."""
        sizes = layer_sizes(self.ir, index, choice)
        if not sizes:
            return 0.0
        return self._known(
            f"{index}:{choice.groups}x{choice.queries},{choice.ffn}",
            lambda: self.scorer.block(index, self.library.values(sizes)),
        )

    def _dropped(self, index: int) -> float:
        return self._known(f"{index}:dropped", lambda: self.scorer.without(index))

    def _known(self, key: str, run: Callable[[], float]) -> float:
        if key not in self.run:
            self.run[key] = run()
            with atomic(self.partial) as scratch:
                scratch.write_text(json.dumps(self.run), "utf-8")
        return self.run[key]
