"""Exposure of every record under a defense: two numbers in decibels, and success with a list, without running an attack.

What the defense does is taken from the attacker who knows it, as in `gradveil.risk.exposure`: what he compares is linearised, and
Gaussian noise of known strength is told apart. What rounding leaves between his picture of the release and what was sent is
noise that has nothing to do with the record, after the best common factor of each layer. A defense of which he knows too little,
or whose randomness has no known law, has no decibels, and the reason says so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradveil.defenses import Defense, spell_defense
from gradveil.errors import GradveilError
from gradveil.learning import EmbeddingLearner, Learner
from gradveil.randomness import Seed
from gradveil.records import Batch
from gradveil.risk.defended import DefendedRelease, Releases
from gradveil.risk.linear_bayes import Linearised, decibels, posterior_error
from gradveil.risk.listed import named_first
from gradveil.risk.prior import Prior
from gradveil.spectra.along import Layout, grams_along, layout_of
from gradveil.spectra.jacobians import as_vector
from gradveil.spectra.layered import layer_of
from gradveil.study.exposures import Exposure, PublicRecords, RecordExposure
from gradveil.tensors import Named

__all__ = ["Along", "expose"]

DRAWS = 8
"""Steps of the prior along which the curvature of a release is measured."""
CANDIDATES = 64
"""Other records on the list that distances are taken to, at most."""
KEPT = 2**24
"""Numbers of undefended updates that stay in memory, 128 megabytes."""
LIST_VALUES = 2**27
"""Shared values that the releases of a list may hold at once; fewer candidates where they would be more."""
ROUNDING = 2.0**-22
"""Relative size of what single precision leaves in a release and its derivatives."""
SEEN = 1e-3
"""Relative difference of what was sent and what its attacker pictures, up to which nothing hidden was drawn."""


@dataclass(frozen=True, eq=False)
class Along:
    """What a release does along the directions of a prior; the same under all defenses that only add noise to what is shared.

    Attributes:
        layout: Which layers the shared vector is made of.
        own: Gram matrices of the directions.
        left: For each layer the squares of what the directions leave out, by row.
        bent: For each layer the curvature, by value.
        rows: Rows that ``left`` stands for.
    """

    layout: Layout
    own: Linearised
    left: Named
    bent: Mapping[str, float]
    rows: int

    @property
    def entries(self) -> int:
        """Numbers that are held."""
        return sum(gram.numel() for gram in self.own.grams.values())


def expose(
    learner: Learner,
    batch: Batch,
    defense: Defense,
    *,
    prior: Prior,
    others: Batch | None = None,
    beside: int = 0,
    model: str = "",
    rows: Sequence[int] | None = None,
    seed: Seed | None = None,
    progress: Callable[[int], None] | None = None,
    known: MutableMapping[Hashable, Along] | None = None,
) -> Exposure:
    """Return how exposed each record of a batch is, alone in one update or beside others.

    Args:
        learner: The client's training, with the model as the defense adapts it.
        batch: The records.
        defense: What protects them.
        prior: What the attacker knows of the data.
        others: Other records with their labels: candidates on a list, and what stands beside the record in a batch.
        beside: How many other records one update holds, as noise; only for defenses that leave the mean of a batch a mean.
        model: Spelling, for the record.
        rows: Rows of the records in their data set.
        seed: Root of all randomness.
        progress: Called with the number of finished records.
        known: What was found of this learner's undefended updates, with this prior and seed: read where it is there, filled where
            not, while it is small.
    """
    measure = _Measure(Releases(learner, defense), prior, others, beside, {} if known is None else known)
    found: list[RecordExposure] = []
    for index in range(len(batch)):
        row = index if rows is None else rows[index]
        found.append(measure.record(batch.inputs[index], batch.targets[index], row, (seed or Seed(0)).child("risk", index)))
        if progress is not None:
            progress(len(found))
    public = PublicRecords(source=prior.source, records=prior.records, rank=prior.rank, kept=prior.kept)
    return Exposure(
        model=model,
        defense=spell_defense(defense),
        public=public,
        records=tuple(found),
        reason=measure.reason,
        unlisted=measure.unlisted,
    )


@dataclass
class _Measure:
    """One defense and its records; the first reason that stands against a number holds for all of them."""

    releases: Releases
    prior: Prior
    others: Batch | None
    beside: int
    known: MutableMapping[Hashable, Along]
    reason: str = ""
    unlisted: str = ""
    listed: list[Tensor] = field(default_factory=list)

    @property
    def tells_labels(self) -> bool:
        """Whether what is seen gives labels away, alone in an update: an embedding does not."""
        return not self.beside and not isinstance(self.releases.learner, EmbeddingLearner)

    def record(self, point: Tensor, target: Tensor, row: int, seed: Seed) -> RecordExposure:
        begun = time.perf_counter()
        label = int(target) if target.ndim == 0 else None
        away = point.flatten().double().cpu() - self.prior.mean_of(label if self.tells_labels else None)
        null = float(away.square().mean())
        values: dict[str, float | None] = {}
        release = self.releases.of(point, target, seed, torch.float32)
        drawn = _hidden(release)
        self.reason = self.reason or self._against(release, drawn, null)
        if not self.reason:
            try:
                values = self._decibels(release, away, null, row, seed)
            except GradveilError as error:
                self.reason = str(error)
        listed = self._list(release, drawn)
        seconds = round(time.perf_counter() - begun, 3)
        return RecordExposure(
            row=row,
            label=label,
            exposure=values.get("exposure"),
            linear=values.get("linear"),
            error=values.get("error"),
            null=null,
            listed=listed,
            seconds=seconds,
        )

    def _against(self, release: DefendedRelease, drawn: bool, null: float) -> str:
        """Return why there can be no decibels, or nothing."""
        if null <= 1e-12:
            return "a record is the mean of the public ones, so there is nothing to find out about it"
        if release.blind:
            return f"no decibels, attack it instead: {release.blind}"
        if release.directed:
            return "no decibels, attack it instead: the noise has directions of its own, which exposure does not count"
        if drawn:
            return "no decibels, attack it instead: the defense draws randomness of unknown law"
        if self.beside and (self.others is None or len(self.others) < 2):
            return "no decibels: other records stand beside it, and there are none to tell how much they hide"
        if self.beside and not (release.plain and not release.data_noise):
            return "no decibels, attack it instead: what the defense does to the mean of a batch has no part for each record"
        return ""

    def _decibels(self, release: DefendedRelease, away: Tensor, null: float, row: int, seed: Seed) -> dict[str, float | None]:
        key = (row, release.data_noise, seed)
        found = self.known.get(key) if release.plain else None
        if found is None:
            found = self._along(release, away, seed)
            if release.plain and found.entries + sum(each.entries for each in self.known.values()) <= KEPT:
                self.known[key] = found
        if not any(bool(gram.any()) for gram in found.own.grams.values()):
            return {"exposure": 0.0, "linear": 0.0, "error": null}
        noise = self._noise(release, found)
        errors = [
            posterior_error(found.own, self.prior, each, data_noise=release.data_noise)
            for each in (noise, {layer: noise[layer] + found.bent[layer] for layer in noise})
        ]
        return {"linear": decibels(null, errors[0]), "exposure": decibels(null, errors[1]), "error": errors[1]}

    def _along(self, release: DefendedRelease, away: Tensor, seed: Seed) -> Along:
        """Push the directions of the prior, and probes of what they leave out, through the release."""
        jacobian, prior = release.jacobian, self.prior
        layout = layout_of(jacobian)
        directions = torch.cat([prior.basis.T, away.unsqueeze(0)])
        grams = {layer: gram.cpu() for layer, gram in grams_along(jacobian, directions, layout).items()}
        own = Linearised(grams, prior.basis.T @ away, float(away.square().sum()), jacobian.inputs)
        probes = prior.outside
        if release.data_noise:  # what is white on the record reaches outside the directions of the prior, too
            drawn = torch.randn((DRAWS, jacobian.inputs), generator=seed.generator("outside"), dtype=torch.float64)
            white = drawn - (drawn @ prior.basis) @ prior.basis.T
            probes = torch.cat([probes, release.data_noise * math.sqrt(len(probes) / DRAWS) * white])
        left = layout.squares(jacobian.push(probes.to(jacobian.at))) if len(probes) else {}
        return Along(layout, own, left, self._curvature(release, layout, seed), max(1, len(prior.outside)))

    def _noise(self, release: DefendedRelease, along: Along) -> dict[str, float]:
        """Return the variance of every value of each layer: known noise, rounding, others in the update, what the prior omits."""
        prior, layout = self.prior, along.layout
        shared = layout.squares(release.jacobian.shared.unsqueeze(0))
        rounded, crowd = _rounding(release), self._crowd(release, layout)
        found = {}
        for layer, size in layout.sizes.items():
            moved = float((along.own.grams[layer].diagonal()[: prior.rank] * prior.variances).sum())
            floor = ROUNDING**2 * (float(shared[layer]) + moved) / size
            outside = float(along.left[layer].sum()) / along.rows / size if along.left else 0.0
            known = (release.shared_noise * (1 + self.beside)) ** 2
            found[layer] = known + floor + outside + rounded.get(layer, 0.0) + crowd.get(layer, 0.0)
        return found

    def _crowd(self, release: DefendedRelease, layout: Layout) -> dict[str, float]:
        """Return what other records of an update add to each value, in units in which the record's own part has weight one."""
        if not self.beside or self.others is None:
            return {}
        sent = torch.stack([as_vector(self.releases.other(release, *each)) for each in self._candidates(release)])
        spread = layout.squares(sent - sent.mean(0))
        return {
            layer: self.beside * float(value.sum()) / max(1, len(sent) - 1) / layout.sizes[layer]
            for layer, value in spread.items()
        }

    def _curvature(self, release: DefendedRelease, layout: Layout, seed: Seed) -> dict[str, float]:
        """Return E |f(x + δ) - f(x) - J δ|² of each layer, by value, over steps δ of the prior."""
        jacobian, prior = release.jacobian, self.prior
        drawn = torch.randn((DRAWS, prior.rank), generator=seed.generator("curvature"), dtype=torch.float64)
        steps = ((drawn * prior.variances.sqrt()) @ prior.basis.T).to(jacobian.at)
        straight = jacobian.push(steps)
        with torch.no_grad():
            bent = torch.stack([as_vector(jacobian.share(jacobian.at + step.reshape(jacobian.at.shape))) for step in steps])
        away = layout.squares(bent - jacobian.shared - straight)
        return {layer: float(value.mean()) / layout.sizes[layer] for layer, value in away.items()}

    def _candidates(self, release: DefendedRelease) -> list[tuple[Tensor, Tensor]]:
        assert self.others is not None
        most = max(2, min(CANDIDATES, LIST_VALUES // max(1, release.jacobian.outputs)))
        return list(zip(self.others.inputs[:most], self.others.targets[:most], strict=True))

    def _list(self, release: DefendedRelease, drawn: bool) -> float | None:
        """Return how often the record is named first on a list; None, with a reason, where nobody can say."""
        if self.others is None or len(self.others) < 2:
            self.unlisted = self.unlisted or "a list takes other records, and there are none"
        elif release.blind or release.directed or drawn or release.data_noise or self.beside:
            why = "the noise is not one of known law on what is sent" if not self.beside else "other records stand beside it"
            self.unlisted = self.unlisted or f"no number of a list: {why}"
        if self.unlisted:
            return None
        own = release.jacobian.shared
        floor = ROUNDING**2 * float(own.double().square().mean())
        squares = [float((as_vector(other) - own).double().square().sum()) for other in self._sent(release)]
        return named_first([math.sqrt(square / max(release.shared_noise**2 + floor, 1e-300)) for square in squares])

    def _sent(self, release: DefendedRelease) -> list[Tensor]:
        """Return what the candidates would have sent; where that does not depend on the record, it is made once for all."""
        if release.plain and self.listed:
            return self.listed
        found = [as_vector(self.releases.other(release, *each)) for each in self._candidates(release)]
        if release.plain:
            self.listed = found
        return found


def _hidden(release: DefendedRelease) -> bool:
    """Whether the defense drew something that its attacker does not see: what he pictures at the truth is not what was sent."""
    if not release.random:
        return False
    return any(value > SEEN**2 for value in _residuals(release, gain=False).values()) or release.sent is None


def _rounding(release: DefendedRelease) -> dict[str, float]:
    """Return the variance, by value of each layer, of what separates what was sent from its picture, after the best factor.

    Only of releases without noise: noise is known better than measured.
    """
    if release.shared_noise or release.data_noise:
        return {}
    return _residuals(release, gain=True)


def _residuals(release: DefendedRelease, *, gain: bool) -> dict[str, float]:
    """Return mean |sent / a - pictured|² by layer, a the best factor or 1; without it, relative to mean |pictured|²."""
    with torch.no_grad():
        pictured = release.jacobian.share(release.jacobian.at)
    if isinstance(pictured, Tensor) or release.sent is None:
        return {}
    sums: dict[str, list[Tensor]] = {}
    for name, value in pictured.items():
        seen = release.sent.get(name)
        if seen is None or seen.shape != value.shape:
            continue
        p, s = value.double().flatten(), seen.double().flatten()
        own = torch.stack([p @ p, p @ s, s @ s, torch.tensor(float(len(p)), dtype=p.dtype, device=p.device)])
        sums.setdefault(layer_of(name), []).append(own)
    found = {}
    for layer, parts in sums.items():
        square, across, total, count = (float(each) for each in torch.stack(parts).sum(0))
        if square <= 0:
            continue
        factor = across / square if gain else 1.0
        if factor <= 0:
            found[layer] = square / count * 1e6  # nothing of the record is left in the direction of its picture
            continue
        left = max(0.0, total - 2 * factor * across + factor**2 * square) / factor**2
        found[layer] = left / count if gain else left / square
    return found
