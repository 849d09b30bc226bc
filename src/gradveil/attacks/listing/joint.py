"""Which candidates add up to a release: records of a batch are noise to one candidate, less so to all at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.optimize import nnls
from torch import Tensor

from gradveil.attacks.listing.hypotheses import Hypotheses
from gradveil.learning.learner import Learner
from gradveil.randomness import Seed
from gradveil.records import Observation
from gradveil.tensors import Named

__all__ = ["Joint", "Sketch", "single_updates"]

SKETCH = 4096
TINY = 1e-30


class Sketch:
    """A count sketch, which is linear: every entry, with a random sign, is added to one of a few numbers."""

    def __init__(self) -> None:
        """Draw nothing yet: the size is that of the first update."""
        self._drawn: tuple[Tensor, Tensor] | None = None

    def of(self, updates: Sequence[Named], seed: Seed) -> Tensor:
        """Return the sketch of the updates of all rounds; what has few entries is kept as it is."""
        flat = torch.cat([value.detach().reshape(-1).cpu() for update in updates for value in update.values()]).double()
        if len(flat) <= SKETCH:
            return flat
        if self._drawn is None:
            generator = seed.generator("sketch")
            places = torch.randint(SKETCH, flat.shape, generator=generator)
            self._drawn = places, torch.randint(2, flat.shape, generator=generator).double() * 2 - 1
        places, signs = self._drawn
        return torch.zeros(SKETCH, dtype=torch.float64).index_add(0, places, flat * signs)


def single_updates(learners: Sequence[Learner], inputs: Tensor, labels: Tensor) -> list[Named]:
    """Return the undefended updates, round by round, of a client who has one record."""
    alone = [learner.replace(settings=learner.settings.replace(clients=1)) for learner in learners]
    device = learners[0].device
    return [learner.update(inputs[None].to(device), labels[None].to(device)) for learner in alone]


@dataclass(frozen=True)
class Joint:
    """Releases beside the undefended updates of all candidates, in coordinates that span the latter.

    Attributes:
        columns: (N, N) upper triangular: the updates of length one, column by column.
        seen: (R, N) the releases under attack, of length one before what lies outside is left out.
        own: (S, N) releases the attacker made.
    """

    columns: Tensor
    seen: Tensor
    own: Tensor

    @classmethod
    def of(cls, observations: Sequence[Observation], own: Sequence[Named], hypotheses: Hypotheses) -> Joint | None:
        """Sketch everything; None where what is seen of a batch is no sum over its records, as of an embedding."""
        learners, sketch, seed = observations[0].learners, Sketch(), hypotheses.seed
        first = single_updates(learners, hypotheses.inputs[0], hypotheses.labels[0])
        shapes = [{name: value.shape for name, value in update.items()} for update in first]
        releases = [[update.weights for update in each.updates] for each in observations]
        made = [[{name: each[f"{place}|{name}"] for name in update} for place, update in enumerate(first)] for each in own]
        if any([{name: value.shape for name, value in update.items()} for update in each] != shapes for each in releases[:1]):
            return None
        rows = [single_updates(learners, x, y) for x, y in zip(hypotheses.inputs, hypotheses.labels, strict=True)]
        columns = _of_length_one(torch.stack([sketch.of(each, seed) for each in rows]))
        basis, upper = torch.linalg.qr(columns.T)
        ordered = [[{name: update[name] for name in like} for update, like in zip(e, first, strict=True)] for e in releases]
        seen, mine = (_of_length_one(torch.stack([sketch.of(e, seed) for e in part])) @ basis for part in (ordered, made))
        return cls(columns=upper, seen=seen, own=mine)

    def shares(self, releases: Tensor, listed: Tensor) -> Tensor:
        """Return (R, N) how much of each listed candidate is in a release, none of them less than nothing, all fitted at once."""
        found = torch.zeros_like(listed, dtype=torch.float64)
        for row, (release, shown) in enumerate(zip(releases, listed, strict=True)):
            places = shown.nonzero().flatten()
            found[row, places] = _fitted(self.columns[:, places], release)
        return found


def _fitted(columns: Tensor, release: Tensor) -> Tensor:
    try:
        shares, _ = nnls(columns.numpy(), release.numpy(), maxiter=50 * columns.shape[1])
    except RuntimeError:  # it did not settle; without the bound it always does
        unbounded: Tensor = torch.linalg.lstsq(columns, release[:, None], driver="gelsd").solution[:, 0]
        return unbounded.clamp_min(0)
    return torch.from_numpy(shares)


def _of_length_one(rows: Tensor) -> Tensor:
    found: Tensor = rows / rows.norm(dim=1, keepdim=True).clamp_min(TINY)
    return found
