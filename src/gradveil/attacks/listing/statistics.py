"""How well a candidate explains releases, in a few numbers per pair, tensor by tensor and without holding all of them at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.tensors import Named

__all__ = ["FEATURES", "Laws", "Scalars", "Sent", "features_of"]

FEATURES = ("whitened", "scaled", "scaled_by_tensor", "lengths", "angles", "angles_where_sent")
"""Of each pair of a candidate and a release:

* ``whitened``: -½ Σ |y - m|² / v over all entries, m the mean of the candidate's own draws and v what draws vary by.
* ``scaled``: the same under the best common factor of m, with unknown variance: -½ P ln of the residual.
* ``scaled_by_tensor``: with a factor of its own for every tensor.
* ``lengths``: -Σ ln(1 + z²) over tensors, z how far ln |y| lies from that of the candidate's own draws, in their deviations.
* ``angles``: the same of |cos(y, g)|, g the candidate's gradient without a defense: an orthogonal release gives itself away.
* ``angles_where_sent``: the same of |cos| where y is not zero, which sees through any pruning.

Last in a row of features, and used only where they clearly help (`Evidence`), stand the signs: ½ Σ sign(y) sign(m), tensor by
tensor at the odds at which signs of the attacker's own releases are those of the mean. They survive wild factors of entries.
"""
LENGTH, ANGLE, SUPPORT = 0, 1, 2
ROUNDING = 2.0**-20
"""Relative size of what rounding to single precision leaves, sums included."""
LEAST = (ROUNDING, ROUNDING / 16, ROUNDING / 16)
"""Deviation of ln |y| and of cosines that is rounding."""
SHRINK = 16.0
"""Releases that the mean variance of a tensor counts as, beside those seen, for the variance of one entry."""
COLUMNS = 2**21
TINY = 1e-30


def _flat(value: Tensor) -> Tensor:
    return value.detach().double().reshape(-1)


@dataclass(frozen=True)
class Scalars:
    """Three numbers per tensor of one release beside one undefended update: ln of the length, |cos|, |cos| where it was sent."""

    values: Tensor  # (L, 3)

    @classmethod
    def of(cls, release: Named, raw: Named) -> Scalars:
        """Compute them."""
        rows = []
        for name, value in release.items():
            y, g = _flat(value), _flat(raw[name]) if name in raw else torch.zeros_like(_flat(value))
            dot, kept = (y * g).sum(), (g.square() * (y != 0)).sum()
            rows.append(scalars(y.square().sum(), dot, g.square().sum(), kept))
        return cls(torch.stack(rows))


def scalars(square: Tensor, dot: Tensor, raw: Tensor, kept: Tensor) -> Tensor:
    """Return the three numbers (..., 3) from |y|², <y, g>, |g|² and |g|² where y is not zero."""
    length = 0.5 * (square + TINY).log()
    angle = dot.abs() / (square * raw + TINY).sqrt()
    where = dot.abs() / (square * kept + TINY).sqrt()
    return torch.stack(torch.broadcast_tensors(length, angle, where), dim=-1)


@dataclass(frozen=True)
class Sent:
    """One candidate as the attacker knows it: the mean of its own draws, its undefended update, and the numbers of its draws."""

    mean: Named
    raw: Named
    expected: Tensor  # (L, 3)

    @classmethod
    def of(cls, draws: Sequence[Named], raw: Named) -> Sent:
        """Put a candidate's draws together."""
        mean = {name: torch.stack([draw[name] for draw in draws]).mean(0) for name in draws[0]}
        return cls(mean, raw, torch.stack([Scalars.of(draw, raw).values for draw in draws]).mean(0))


class Laws:
    """How far a release lies from what its own candidate leads one to expect, learned from releases the attacker made."""

    def __init__(self, releases: Sequence[Named], sent: Sequence[Sent]) -> None:
        """Learn the variance of every entry, shrunk to the mean of its tensor, and that of the numbers per tensor."""
        self.precision: Named = {}
        self.odds: dict[str, float] = {}
        count = len(releases)
        for name in releases[0]:
            square = torch.zeros_like(_flat(releases[0][name]))
            energy = torch.zeros_like(square)
            same = told = 0.0
            for release, own in zip(releases, sent, strict=True):
                y, m = _flat(release[name]), _flat(own.mean[name])
                square += (y - m).square()
                energy += y.square()
                agree = y.sign() * m.sign()
                same, told = same + float((agree > 0).sum()), told + float((agree != 0).sum())
            self.odds[name] = math.log((same + 1) / (told - same + 1))
            floor = ROUNDING**2 * energy.sum() / (count * energy.numel()) + TINY
            variance = (square + SHRINK * square.mean() / count) / (count + SHRINK)
            self.precision[name] = 1 / (variance + floor)
        found = torch.stack([Scalars.of(release, own.raw).values for release, own in zip(releases, sent, strict=True)])
        away = (found - torch.stack([own.expected for own in sent])).square().mean(0)
        self.deviation = (away + torch.tensor(LEAST, dtype=away.dtype, device=away.device).square()).sqrt()  # (L, 3)


def features_of(releases: Sequence[Named], candidates: Sequence[Sent], laws: Laws) -> Tensor:
    """Return (R, b, F + 1) features of some candidates beside all releases, signs the last."""
    sums = _Sums(len(releases), candidates)
    for place, name in enumerate(releases[0]):
        sums.add(_moments([r[name] for r in releases], [c.mean[name] for c in candidates], _raws(candidates, name), laws, name))
        sums.tell(place, laws)
    return sums.features()


def _raws(candidates: Sequence[Sent], name: str) -> list[Tensor]:
    return [c.raw[name] if name in c.raw else torch.zeros_like(c.mean[name]) for c in candidates]


@dataclass(frozen=True)
class _Moments:
    """Sums over the entries of one tensor: (R, 1), (1, b) or (R, b)."""

    entries: int
    seen: Tensor  # |y|²
    weighed: Tensor  # |y|² / v
    means: Tensor  # |m|² / v
    across: Tensor  # <y, m> / v
    dots: Tensor  # <y, g>
    raws: Tensor  # |g|²
    kept: Tensor  # |g|² where y is not zero
    signs: Tensor  # <sign y, sign m>, by the odds of the tensor


def _moments(releases: Sequence[Tensor], means: Sequence[Tensor], raws: Sequence[Tensor], laws: Laws, name: str) -> _Moments:
    precision = laws.precision[name]
    rows, columns = len(releases), len(means)
    like = precision
    seen, weighed = like.new_zeros(rows, 1), like.new_zeros(rows, 1)
    mean_squares, raw_squares = like.new_zeros(1, columns), like.new_zeros(1, columns)
    across, dots, kept, signs = (like.new_zeros(rows, columns) for _ in range(4))
    step = max(1, COLUMNS // max(rows, columns))
    flat = [[each.reshape(-1) for each in side] for side in (releases, means, raws)]
    for start in range(0, precision.numel(), step):
        part = slice(start, start + step)
        y, m, g = (torch.stack([each[part] for each in side]).double() for side in flat)
        w = precision[part]
        wy = y * w
        seen += y.square().sum(1, keepdim=True)
        weighed += (wy * y).sum(1, keepdim=True)
        mean_squares += (m.square() * w).sum(1)
        raw_squares += g.square().sum(1)
        across += wy @ m.T
        dots += y @ g.T
        kept += (y != 0).double() @ g.square().T
        signs += y.sign() @ m.sign().T
    return _Moments(precision.numel(), seen, weighed, mean_squares, across, dots, raw_squares, kept, laws.odds[name] * signs / 2)


class _Sums:
    """Adds up what the tensors say."""

    def __init__(self, rows: int, candidates: Sequence[Sent]) -> None:
        self.expected = torch.stack([c.expected for c in candidates])  # (b, L, 3)
        shape = rows, len(candidates)
        self.distance, self.by_tensor, self.signs = (self.expected.new_zeros(shape) for _ in range(3))
        self.weighed, self.means, self.across = (self.expected.new_zeros(shape) for _ in range(3))
        self.stray = self.expected.new_zeros((*shape, 3))
        self.entries = 0
        self.moments: _Moments | None = None

    def add(self, found: _Moments) -> None:
        self.moments = found
        self.entries += found.entries
        self.distance = self.distance + (found.weighed + found.means - 2 * found.across).clamp_min(0)
        self.weighed, self.means = self.weighed + found.weighed, self.means + found.means
        self.across, self.signs = self.across + found.across, self.signs + found.signs
        self.by_tensor = self.by_tensor - 0.5 * found.entries * _unexplained(found.weighed, found.means, found.across)

    def tell(self, place: int, laws: Laws) -> None:
        assert self.moments is not None
        own = scalars(self.moments.seen, self.moments.dots, self.moments.raws, self.moments.kept)
        z = (own - self.expected[None, :, place]) / laws.deviation[place]
        self.stray = self.stray - torch.log1p(z.square())

    def features(self) -> Tensor:
        scaled = -0.5 * self.entries * _unexplained(self.weighed, self.means, self.across)
        numbers = torch.stack([-0.5 * self.distance, scaled, self.by_tensor], -1)
        return torch.cat([numbers, self.stray, self.signs[..., None]], -1).cpu()


def _unexplained(weighed: Tensor, means: Tensor, across: Tensor) -> Tensor:
    """Return ln of the share of a release that no multiple of a mean explains, down to rounding."""
    cosine = across.square() / (weighed * means).clamp_min(TINY)
    return ((1 - cosine).clamp_min(0) + ROUNDING**2).log()
