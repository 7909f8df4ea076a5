"""How much other programs disturb a measurement: the share of the cores that is not ours while the clock runs."""

from __future__ import annotations

import time
from dataclasses import dataclass

QUIET = 0.04
"""A round during which others took more of the cores than this is disturbed: engines' threads wait for each other."""


@dataclass(frozen=True)
class Mark:
    """The clocks at one moment: wall, CPU seconds of the machine, and of this process and its children."""

    wall: float
    machine: float
    own: float

    @classmethod
    def now(cls) -> Mark:
        """The clocks now."""
        import psutil

        busy = psutil.cpu_times()
        machine = sum(getattr(busy, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
        me = psutil.Process()
        own = 0.0
        for process in (me, *me.children(recursive=True)):
            try:
                times = process.cpu_times()
            except psutil.Error:  # a child that has just ended
                continue
            own += times.user + times.system
        return cls(time.monotonic(), machine, own)

    def others(self) -> float:
        """The share of all cores that others took since this mark, 0 to 1."""
        import psutil

        after = Mark.now()
        wall = max(after.wall - self.wall, 1e-3) * (psutil.cpu_count() or 1)
        return min(1.0, max(0.0, (after.machine - self.machine - (after.own - self.own)) / wall))
