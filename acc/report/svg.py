"""A small canvas for inline SVG: the report's charts need no script and no network, and print well."""

from __future__ import annotations

import math

from markupsafe import Markup


class Canvas:
    """Collects shapes; `class_` names a style of the page's sheet, `tip` is shown on hovering."""

    def __init__(self, width: float, height: float, label: str) -> None:
        self.width, self.height, self.label = width, height, label
        self._parts: list[Markup] = []

    def rect(self, x: float, y: float, width: float, height: float, class_: str, tip: str = "") -> None:
        """A rectangle from its upper left corner."""
        self._shape("rect", class_, tip, x=x, y=y, width=max(0.0, width), height=max(0.0, height), rx=1.5)

    def circle(self, x: float, y: float, radius: float, class_: str, tip: str = "") -> None:
        """A circle."""
        self._shape("circle", class_, tip, cx=x, cy=y, r=radius)

    def line(self, x1: float, y1: float, x2: float, y2: float, class_: str, tip: str = "") -> None:
        """A straight line."""
        self._shape("line", class_, tip, x1=x1, y1=y1, x2=x2, y2=y2)

    def text(self, x: float, y: float, words: str, class_: str = "label", anchor: str = "start") -> None:
        """One line of text; `anchor` is start, middle or end."""
        self._parts.append(
            Markup('<text x="{:.1f}" y="{:.1f}" class="{}" text-anchor="{}">{}</text>').format(
                x, y, class_, anchor, words
            )
        )

    def markup(self) -> Markup:
        """The finished element."""
        return Markup('<svg viewBox="0 0 {:.0f} {:.0f}" role="img" aria-label="{}">{}</svg>').format(
            self.width, self.height, self.label, Markup("").join(self._parts)
        )

    def _shape(self, tag: str, class_: str, tip: str, **numbers: float) -> None:
        places = Markup(" ").join(Markup('{}="{:.1f}"').format(name, number) for name, number in numbers.items())
        title = Markup("<title>{}</title>").format(tip) if tip else Markup("")
        self._parts.append(Markup('<{0} class="{1}" {2}>{3}</{0}>').format(tag, class_, places, title))


def ticks(top: float, most: int = 4, *, whole: bool = False) -> list[float]:
    """Round values from 0 up to `top`, in at most `most` steps; `whole` ones for things that are counted."""
    if top <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(top / most))
    steps = (factor * power for factor in (1, 2, 2.5, 5, 10))
    step = next(step for step in steps if top / step <= most and not (whole and step % 1))
    return [step * index for index in range(int(top / step + 1e-9) + 1)]
