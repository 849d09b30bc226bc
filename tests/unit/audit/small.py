"""One small audited cell, for the tests of what stands around it."""

from __future__ import annotations

import functools

from gradveil.audit.cells import Cell
from gradveil.audit.subjects import Subject, build_subject, load_cell_data
from gradveil.data import Dataset

CELL = Cell(data="digits", model="mlp(hidden=16)", records=4, ensemble="linear_layer")


@functools.cache
def digits() -> Dataset:
    return load_cell_data(CELL)


def make_subject(rehearsals: int = 0, **changes: object) -> Subject:
    return build_subject(CELL.replace(**changes), digits(), rehearsals)
