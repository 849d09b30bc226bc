"""Who owns which features: vertical learning, where parties hold different parts of the same records.

A division is a frozen dataclass that is its own configuration, ``left_right(parties=2)``. `split` gives one tensor per party,
`join` puts them back together; every input value belongs to exactly one party. Labels belong to the label owner alone.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradveil.data.base import Dataset
from gradveil.errors import UsageError
from gradveil.registry import Card, Registry

__all__ = ["DIVISIONS", "Columns", "Division", "LeftRight", "TopBottom", "Whole", "part_of"]


@dataclass(frozen=True)
class Division(ABC):
    """How the values of one input are divided among parties: each takes some places along one axis."""

    card: ClassVar[Card]
    axis: ClassVar[int] = -1
    """The axis that is divided, counted from the end; embeddings that keep their places are joined along it."""

    @abstractmethod
    def places(self, input_shape: tuple[int, ...]) -> list[list[int]]:
        """Return the places along `axis` of each party, for inputs of this shape; or raise `UsageError`."""

    def shapes(self, input_shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the shape of each party's part of one input."""
        found = []
        for places in self.places(input_shape):
            shape = list(input_shape)
            shape[self.axis] = len(places)
            found.append(tuple(shape))
        return found

    def split(self, inputs: Tensor) -> list[Tensor]:
        """Return each party's part of inputs (B, ...); differentiable."""
        found = []
        for places in self.places(tuple(inputs.shape[1:])):
            # A run of places is a view, which vmap and autograd handle without gathering.
            run = places == list(range(places[0], places[0] + len(places)))
            if run:
                found.append(inputs.narrow(self.axis, places[0], len(places)))
            else:
                found.append(inputs.index_select(self.axis, torch.tensor(places, device=inputs.device)))
        return found

    def join(self, parts: Sequence[Tensor], input_shape: tuple[int, ...]) -> Tensor:
        """Return the inputs whose parts these are: the inverse of `split`."""
        places = self.places(input_shape)
        if len(parts) != len(places):
            raise UsageError(f"{len(parts)} parts do not make an input of {len(places)} parties; give one part per party")
        order = torch.tensor([place for own in places for place in own], device=parts[0].device)
        return torch.cat(list(parts), dim=self.axis).index_select(self.axis, order.argsort())


DIVISIONS: Registry[type[Division], Card] = Registry("division", "gradveil.data")


def part_of(dataset: Dataset, division: Division, party: int) -> Dataset:
    """Return the data set of one party: its part of every record.

    Labels and record ids stay: an audit scores with them. A party that is not the label owner does not have them, and nothing it
    computes here looks at them.
    """
    parts = len(division.places(dataset.input_shape))
    if not 0 <= party < parts:
        raise UsageError(f"there is no party {party}; the data is divided among parties 0 to {parts - 1}")
    return dataclasses.replace(dataset, inputs=division.split(dataset.inputs)[party].contiguous())


def _runs(length: int, parties: int, what: str) -> list[list[int]]:
    """Deal places out in runs whose lengths differ by at most one."""
    if parties < 1:
        raise UsageError(f"{parties} parties cannot share an input; ask for at least 1")
    if parties > length:
        raise UsageError(f"{parties} parties cannot share {length} {what}; ask for at most {length} parties")
    sizes = [length // parties + (index < length % parties) for index in range(parties)]
    starts = [sum(sizes[:index]) for index in range(parties)]
    return [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]


@DIVISIONS.register(Card(name="whole", summary="One party has all features, the label owner has none: split learning."))
@dataclass(frozen=True)
class Whole(Division):
    """One party with everything."""

    def places(self, input_shape: tuple[int, ...]) -> list[list[int]]:
        """Return all places for the only party."""
        return [list(range(input_shape[-1]))]


@DIVISIONS.register(Card(name="left_right", summary="Pictures or signals are cut into upright strips, one per party."))
@dataclass(frozen=True)
class LeftRight(Division):
    """Strips along the last axis: (C, H, W) into (C, H, W/n), (C, T) into (C, T/n)."""

    parties: int = 2

    def places(self, input_shape: tuple[int, ...]) -> list[list[int]]:
        """Return runs of columns."""
        if len(input_shape) < 2:
            raise UsageError(f"left_right divides pictures and signals, not inputs of shape {input_shape}; use columns")
        return _runs(input_shape[-1], self.parties, "columns of pixels")


@DIVISIONS.register(Card(name="top_bottom", summary="Pictures are cut into lying strips, one per party."))
@dataclass(frozen=True)
class TopBottom(Division):
    """Strips along the second last axis: (C, H, W) into (C, H/n, W)."""

    axis: ClassVar[int] = -2
    parties: int = 2

    def places(self, input_shape: tuple[int, ...]) -> list[list[int]]:
        """Return runs of rows."""
        if len(input_shape) != 3:
            raise UsageError(f"top_bottom divides pictures (C, H, W), not shape {input_shape}; use left_right or columns")
        return _runs(input_shape[-2], self.parties, "rows of pixels")


@DIVISIONS.register(Card(name="columns", summary="Tables: every party has some feature columns, in runs or as listed."))
@dataclass(frozen=True)
class Columns(Division):
    """Feature columns of tabular inputs (F,).

    Attributes:
        parties: How many parties share the columns in runs; not used where ``groups`` are given.
        groups: The columns of each party, as ``((0, 3), (1, 2))``; every column exactly once.
    """

    parties: int = 2
    groups: tuple[tuple[int, ...], ...] = ()

    def places(self, input_shape: tuple[int, ...]) -> list[list[int]]:
        """Return the columns of each party."""
        if len(input_shape) != 1:
            raise UsageError(f"columns divides tables (features,), not shape {input_shape}; use left_right or top_bottom")
        if not self.groups:
            return _runs(input_shape[0], self.parties, "feature columns")
        listed = [int(place) for group in self.groups for place in group]
        if sorted(listed) != list(range(input_shape[0])) or not all(self.groups):
            raise UsageError(
                f"groups must name each of the columns 0 to {input_shape[0] - 1} exactly once, and give every party one"
            )
        return [[int(place) for place in group] for group in self.groups]
