"""One small audited cell, for the tests of what stands around it."""

from __future__ import annotations

import functools

from gradveil.audit.scene import Subject, build_subject, load_cell_data
from gradveil.data import Dataset
from gradveil.study.cell import Cell

CELL = Cell(data="digits", model="mlp(hidden=16)", records=4, ensemble="linear_layer", lists="off")


@functools.cache
def digits() -> Dataset:
    return load_cell_data(CELL)


@functools.cache
def few_digits() -> Dataset:
    """Return so few records that none can be held out of a training."""
    return digits().take(range(100))


def make_subject(rehearsals: int = 0, **changes: object) -> Subject:
    return build_subject(CELL.replace(**changes), digits(), rehearsals)
