"""Results of costly work that many ask for in a row, kept by the content of what they were made from."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from torch import Tensor

from gradveil.tensors import digest

__all__ = ["Recent", "content_of"]

T = TypeVar("T")


class Recent(Generic[T]):
    """The last few results, by content: whoever asks with the same content gets the same result, and who asks never matters.

    Only keys are kept beside the results, so neither a model nor pictures live on for having been asked about. What is made must
    depend on nothing but the key.
    """

    def __init__(self, most: int) -> None:
        """Keep at most this many."""
        self._most = most
        self._made: dict[Hashable, T] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result for a key, made if need be."""
        if key not in self._made:
            self._made[key] = make()
            for old in list(self._made)[: -self._most]:
                del self._made[old]
        return self._made[key]

    def clear(self) -> None:
        """Forget everything."""
        self._made.clear()


def content_of(value: Tensor | None) -> str:
    """Return a tensor's content as a part of a key; empty where there is none."""
    return "" if value is None else f"{value.device}|{digest({'': value})}"
