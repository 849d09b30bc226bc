"""What a release does along a few directions of the input: Gram matrices D J_lᵀ J_l Dᵀ, one for each layer l of what is shared.

Apart by layer, because noise, rounding and curvature differ from layer to layer, and sums weighed by any of them follow
from the same matrices. p × m numbers are never held: of a plain gradient the matrices are summed layer by layer
(`gradveil.spectra.layered`), of anything else over pieces of what is shared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradveil.spectra.gram import COLUMN_BYTES
from gradveil.spectra.jacobians import Jacobian, as_vector
from gradveil.spectra.joint import JointJacobian
from gradveil.spectra.layered import STORE_BYTES, layer_of, layered_blocks
from gradveil.tensors import Named

__all__ = ["Layout", "grams_along", "layout_of"]

WHOLE = "shared"
"""The one layer of what is shared as a single tensor, as an embedding is."""
CHECKED = 3
"""Directions whose squared lengths are compared with those of direct products."""
AGREES = 1e-3
"""Relative difference that is rounding of tangents in single precision."""
WIDE = 2**16


@dataclass(frozen=True)
class Layout:
    """Which layer each shared value belongs to.

    Attributes:
        pieces: Layers and numbers of values, in the order of the shared vector; a layer may come several times.
    """

    pieces: tuple[tuple[str, int], ...]

    @property
    def sizes(self) -> dict[str, int]:
        """Values of each layer."""
        found: dict[str, int] = {}
        for layer, count in self.pieces:
            found[layer] = found.get(layer, 0) + count
        return found

    def squares(self, rows: Tensor) -> Named:
        """Return the squared length of every row (n, p) in each layer, (n,) in double precision."""
        found: Named = {}
        for layer, part in self._parts(rows):
            found[layer] = found.get(layer, 0) + part.double().square().sum(1)
        return found

    def grams(self, rows: Tensor, first: int = 0) -> Named:
        """Return the Gram matrix of rows (n, q) in each layer, of values ``first`` to ``first`` + q of the shared vector."""
        found: Named = {}
        for layer, part in self._parts(rows, first):
            for start in range(0, part.shape[1], WIDE):
                wide = part[:, start : start + WIDE].double()
                found[layer] = found.get(layer, 0) + wide @ wide.T
        return found

    def _parts(self, rows: Tensor, first: int = 0) -> Iterator[tuple[str, Tensor]]:
        start, last = 0, first + rows.shape[1]
        for layer, count in self.pieces:
            low, high = max(start, first), min(start + count, last)
            if low < high:
                yield layer, rows[:, low - first : high - first]
            start += count


def layout_of(jacobian: Jacobian) -> Layout:
    """Return which layers the shared vector is made of."""
    with torch.no_grad():
        shared = jacobian.share(jacobian.at)
    if isinstance(shared, Tensor):
        return Layout(((WHOLE, shared.numel()),))
    return Layout(tuple((layer_of(name), value.numel()) for name, value in shared.items()))


def grams_along(jacobian: Jacobian, directions: Tensor, layout: Layout, *, most_bytes: int = 0) -> Named:
    """Return D J_lᵀ J_l Dᵀ for each layer l, in double precision.

    Args:
        jacobian: Of one record.
        directions: D, (n, m), one direction a row.
        layout: From `layout_of`.
        most_bytes: What may be held of all directions at once; 0 takes what suits.
    """
    if jacobian.learner is not None:
        found = layered_blocks(JointJacobian((jacobian,)), directions, store_bytes=most_bytes or STORE_BYTES)
        if set(found) == set(layout.sizes) and _agrees(jacobian, directions, found):
            return found
    return _by_products(jacobian, directions, layout, most_bytes or COLUMN_BYTES)


def _agrees(jacobian: Jacobian, directions: Tensor, found: Named) -> bool:
    """Whether a few squared lengths are those of direct products; weights used outside their layers are missed otherwise."""
    places = torch.linspace(0, len(directions) - 1, min(CHECKED, len(directions))).long()
    direct = jacobian.push(directions[places].to(jacobian.at)).double().square().sum(1)
    summed = torch.stack([gram.diagonal()[places] for gram in found.values()]).sum(0)
    return bool((direct - summed).abs().max() <= AGREES * torch.maximum(direct, summed).max())


def _by_products(jacobian: Jacobian, directions: Tensor, layout: Layout, most_bytes: int) -> Named:
    """Push all directions, and where the results are too many to hold, again for every piece of what is shared."""
    outputs, rows = sum(layout.sizes.values()), directions.to(jacobian.at)
    step = max(1, min(outputs, most_bytes // (len(rows) * jacobian.at.element_size())))
    found: Named = {}
    for first in range(0, outputs, step):
        part = jacobian if step == outputs else _piece(jacobian, first, min(outputs, first + step))
        for layer, gram in layout.grams(part.push(rows), first).items():
            found[layer] = found.get(layer, 0) + gram
    return found


def _piece(jacobian: Jacobian, first: int, last: int) -> Jacobian:
    share = jacobian.share
    return replace(jacobian, share=lambda x: as_vector(share(x))[first:last], learner=None, law=None, own=())
