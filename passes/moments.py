"""The `moments` artifact: statistics of activations over the calibration tokens, and their accumulation.

A folder with `meta.json` (`tokens`: what the sums are over; `length`, `samples`) and `moments.safetensors`, float32:

- `full/<weight>` [in, in]: sum of x xᵀ / tokens of the inputs of the matrices that consume an ffn or kv_group dim.
- `diag/<weight>` [in]: mean square of the inputs of every linear matrix (what an importance matrix needs); the output
  layer's is taken over every eighth position. A tied output layer has its keys under both of its names.
- `absmean/<weight>` [in]: mean absolute value of the same inputs.
- `norm/<gain>` [hidden]: mean square of a norm's output before its gain, that is of x / rms(x), so its mean is 1.
- `norm_output/<gain>`, `norm_absmean/<gain>` [hidden]: mean square and mean absolute value of a norm's output after
  its gain.
- `stream/<layer>` []: mean square of the hidden states that enter a layer; `stream/<depth>` after the last.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Moments:
    """A moments artifact that was read. Values by key, as the module says."""

    tokens: int
    values: Mapping[str, torch.Tensor]
    meta: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Moments:
        """Read a moments folder."""
        from safetensors.torch import load_file

        meta = json.loads((folder / "meta.json").read_text("utf-8"))
        return cls(meta["tokens"], load_file(folder / "moments.safetensors"), meta)

    def write(self, folder: Path) -> None:
        """Write a moments folder."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        save_file({key: value.contiguous() for key, value in self.values.items()}, folder / "moments.safetensors")
        (folder / "meta.json").write_text(json.dumps({"tokens": self.tokens, **self.meta}, indent=1), "utf-8")

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.values[key]

    def names(self, kind: str) -> list[str]:
        """What stands after `kind/` in the keys."""
        return [key.partition("/")[2] for key in self.values if key.startswith(f"{kind}/")]


class Means:
    """Running sums by key that become means over the rows that each key has seen."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._rows: dict[str, int] = {}

    def add(self, key: str, total: torch.Tensor, rows: int) -> None:
        """Add the sum over some rows."""
        if key in self._sums:
            self._sums[key] += total
        else:
            self._sums[key] = total.clone()
        self._rows[key] = self._rows.get(key, 0) + rows

    def means(self) -> dict[str, torch.Tensor]:
        """The mean per row, by key."""
        return {key: total / self._rows[key] for key, total in self._sums.items()}
