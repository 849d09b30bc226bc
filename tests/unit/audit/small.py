"""One small audited cell, for the tests of what stands around it."""

from __future__ import annotations

import functools

import torch

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


@functools.cache
def people() -> Dataset:
    """Return 40 small records of 20 people, whose rows, labels, names and owners run in different orders."""
    inputs = torch.rand(40, 1, 6, 6, generator=torch.Generator().manual_seed(3))
    return Dataset(
        name="people",
        inputs=inputs,
        targets=torch.arange(40) * 3 % 5,
        classes=5,
        class_names=tuple("abcde"),
        records=tuple(f"record {row}" for row in range(40)),
        owners=tuple(f"person {row * 7 % 20}" for row in range(40)),
    )
