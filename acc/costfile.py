"""The file form of a cost table, checked field by field: tables are sent between machines and are not trusted."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from acc import cost

Size = Annotated[int, Field(ge=0, le=1 << 24)]
Count = Annotated[int, Field(ge=0, le=1 << 48)]
Seconds = Annotated[float, Field(gt=0, lt=1e6, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1e3, allow_inf_nan=False)]
Text = Annotated[str, Field(max_length=2000)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Shape(_Strict):
    hidden: Annotated[int, Field(ge=1, le=1 << 24)]
    vocab: Annotated[int, Field(ge=1, le=1 << 24)]
    head_dim: Annotated[int, Field(ge=1, le=1 << 16)]
    tied: bool
    layers: Annotated[list[tuple[Size, Size, Size]], Field(min_length=1, max_length=4096)]


class _Sample(_Strict):
    shape: Size
    quant: Text
    kind: Literal["prefill", "decode"]
    tokens: Annotated[int, Field(ge=1, le=1 << 30)]
    depth: Annotated[int, Field(ge=0, le=1 << 30)]
    seconds: Seconds
    spread: Fraction


class _Memory(_Strict):
    shape: Size
    quant: Text
    context: Count
    batch: Count
    bytes: Annotated[dict[Text, Count], Field(max_length=64)]


class _Provenance(_Strict):
    device: Text
    engine: Text
    engine_version: Text
    build: Text
    threads: Size
    date: Text
    noise: Fraction
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    details: dict[Text, Any]


class _Validation(_Strict):
    models: Size
    median: dict[Text, Fraction]
    p90: dict[Text, Fraction]
    date: Text


class _Table(_Strict):
    format: Literal["acc cost table 1"]
    family: Text
    provenance: _Provenance
    validation: _Validation | None
    shapes: Annotated[list[_Shape], Field(max_length=10_000)]
    samples: Annotated[list[_Sample], Field(min_length=1, max_length=100_000)]
    memory: Annotated[list[_Memory], Field(max_length=100_000)]

    @model_validator(mode="after")
    def _refer_to_shapes(self) -> _Table:
        for number in (*(row.shape for row in self.samples), *(row.shape for row in self.memory)):
            if number >= len(self.shapes):
                raise ValueError(f"a sample refers to shape {number} of {len(self.shapes)}")
        return self


def read(data: Any) -> cost.CostTable:
    """The table in a parsed JSON value. Raises ValueError (pydantic's, with the place) if it is none."""
    import json

    table = _Table.model_validate_json(json.dumps(data))
    shapes = [cost.shape_of_json(shape.model_dump()) for shape in table.shapes]
    return cost.CostTable(
        cost.Provenance(**table.provenance.model_dump()),
        table.family,
        tuple(cost.Sample(**{**row.model_dump(), "shape": shapes[row.shape]}) for row in table.samples),
        tuple(cost.MemorySample(**{**row.model_dump(), "shape": shapes[row.shape]}) for row in table.memory),
        cost.Validation(**table.validation.model_dump()) if table.validation else None,
    )
