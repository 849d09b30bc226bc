"""Load the data that a cell, a training or a federation names, the way it says."""

from __future__ import annotations

from typing import Any, Protocol

from gradveil.data.base import Dataset
from gradveil.data.files import load_data
from gradveil.study.reading import read_options

__all__ = ["Source", "load_source"]


class Source(Protocol):
    """Anything that names data and how to read it."""

    @property
    def data(self) -> str:
        """Built-in name or path."""
        ...

    @property
    def labels(self) -> str:
        """Path of a label file, or empty."""
        ...

    @property
    def scale(self) -> str:
        """How values come to [0, 1]; empty is auto."""
        ...

    @property
    def read(self) -> str:
        """Everything else about reading; see `read_options`."""
        ...


def load_source(source: Source, **more: Any) -> Dataset:
    """Load the data that a cell, a training or a federation names, the way it says.

    Args:
        source: Where the data is and how to read it.
        more: Settings of `load_data` that win over those.
    """
    given = {name: value for name, value in (("labels", source.labels), ("scale", source.scale)) if value}
    return load_data(source.data, **{**given, **read_options(source.read), **more})
