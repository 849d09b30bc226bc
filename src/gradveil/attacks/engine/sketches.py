"""Updates as rows of numbers: small ones whole, large ones as seeded sums that keep inner products, so that memory stays flat.

A tensor with more entries than its share is cut into rows of that width, every entry is given a sign drawn once, and the rows are
summed (a count sketch with buckets in turn; Charikar, Chen and Farach-Colton 2002). The inner product of two such sums is that of
the tensors in expectation over the signs, with a deviation of about |a| |b| / sqrt(width).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.tensors import Named

__all__ = ["ENTRIES", "Sketcher", "shares"]

ENTRIES = 2**16
"""Numbers that stand for one update; an update with no more is kept as it is."""


def shares(sizes: Mapping[str, int], entries: int) -> dict[str, int]:
    """Return how many numbers stand for each tensor: small ones keep all, large ones share what these leave alike.

    >>> shares({"weight": 1000, "bias": 10}, 110)
    {'weight': 100, 'bias': 10}
    """
    left, found = entries, {}
    for place, (name, size) in enumerate(sorted(sizes.items(), key=lambda item: item[1])):
        found[name] = min(size, max(1, left // (len(sizes) - place)))
        left -= found[name]
    return {name: found[name] for name in sizes}


@dataclass(frozen=True)
class Sketcher:
    """Turns updates of one shape into rows.

    Attributes:
        widths: Per tensor how many numbers stand for it.
        signs: Of the entries of every tensor that is summed.
    """

    widths: Mapping[str, int]
    signs: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, example: Named, entries: int = ENTRIES, seed: int = 0) -> Sketcher:
        """Return a sketcher for updates of the shapes of one."""
        widths = shares({name: value.numel() for name, value in example.items()}, entries)
        generator = torch.Generator().manual_seed(seed)
        signs = {
            name: (2 * torch.randint(2, (value.numel(),), generator=generator, dtype=torch.int8) - 1).to(value.device)
            for name, value in example.items()
            if widths[name] < value.numel()
        }
        return cls(widths, signs)

    @property
    def parts(self) -> list[slice]:
        """Where each tensor stands in a row."""
        found, start = [], 0
        for width in self.widths.values():
            found.append(slice(start, start + width))
            start += width
        return found

    def rows(self, many: Named) -> Tensor:
        """Return (N, D) rows of N updates that are stacked along a leading axis."""
        return torch.cat([self._row(name, value.detach().flatten(1)) for name, value in many.items()], 1)

    def _row(self, name: str, value: Tensor) -> Tensor:
        width = self.widths[name]
        if name not in self.signs:
            return value
        signed = value * self.signs[name]
        signed = F.pad(signed, (0, -value.shape[1] % width))
        return signed.reshape(len(value), -1, width).sum(1)
