"""What a run reads and builds once and hands on: data by source, defenses by spelling, models by all that decides them.

Everything here is a value: data sets and defenses are frozen, and a model is given out as a copy. A run makes one of these and
passes it down; each worker process has its own. Nothing is kept beyond the run.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from gradveil.data import Dataset, load_source
from gradveil.data.reading import Source
from gradveil.defenses import Defense, build_defense
from gradveil.models import build_model
from gradveil.study.declare import part_of
from gradveil.study.settings import DataSource

__all__ = ["Materials"]


class Materials:
    """The data, defenses and models of one run."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._data: dict[DataSource, Dataset] = {}
        self._digests: dict[DataSource, str] = {}
        self._defenses: dict[str, Defense] = {}
        self._models: dict[tuple[Any, ...], nn.Module] = {}
        self.spellings: dict[str, tuple[str, ...]] = {}
        """Entries of a plan, with the spellings that each stands for."""

    def dataset(self, source: Source) -> Dataset:
        """Return the data that a cell or training names, read when it is first asked for."""
        asked = part_of(DataSource, source)
        if asked not in self._data:
            self._data[asked] = load_source(asked)
        return self._data[asked]

    def digest(self, source: Source) -> str:
        """Return the digest of the data that a cell or training names."""
        asked = part_of(DataSource, source)
        if asked not in self._digests:
            self._digests[asked] = self.dataset(source).digest()
        return self._digests[asked]

    def defense(self, spelling: str) -> Defense:
        """Return the defense of a spelling, built when it is first asked for."""
        if spelling not in self._defenses:
            self._defenses[spelling] = build_defense(spelling)
        return self._defenses[spelling]

    def keep(self, spelling: str, defense: Defense) -> None:
        """Take in a defense that was built on the way to its spelling."""
        self._defenses.setdefault(spelling, defense)

    def model(self, spelling: str, **settings: Any) -> nn.Module:
        """Return a model of its own for the caller; settings are those of `gradveil.models.build_model`."""
        asked = (spelling, *sorted(settings.items()))
        if asked not in self._models:
            self._models[asked] = build_model(spelling, **settings)
        return copy.deepcopy(self._models[asked])
