"""The attacker with a list who knows the defense: the likelihood of every candidate under the defense's own adversary model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vmap

from gradveil.adversary import OBSERVED, with_prefix
from gradveil.attacks.base import AttackContext
from gradveil.attacks.engine.matrix_convolution import quicker
from gradveil.attacks.listing.client import ListClient
from gradveil.attacks.listing.evidence import Evidence
from gradveil.attacks.listing.generic import DRAWS, apart_of
from gradveil.attacks.listing.hypotheses import Hypotheses
from gradveil.attacks.referee import compare_candidates
from gradveil.learning.learner import Learner
from gradveil.records import AdversaryModel, Observation
from gradveil.tensors import Named, stack

__all__ = ["OWN", "affordable", "own_evidence"]

OWN = "own"
ROUNDING = 2.0**-20
TINY = 1e-30
LAW_HOLDS = 0.05
"""By how much the noise that is left at the truth may differ from what the adversary model tells, to be taken at its word."""
SHORTLIST = 8
LEAST = 8
COMPARED_ENTRIES = 2**24
BLOCK = 32
COLUMNS = 2**22


def own_evidence(
    observations: Sequence[Observation], hypotheses: Hypotheses, context: AttackContext, *, own: int, shortlist: int = SHORTLIST
) -> Evidence:
    """Score every candidate by what the defense's adversary model makes of it.

    The model replays the client at the candidate's own inputs and compares (`AdversaryModel.replay`, ``compare``). Where it tells
    the law of Gaussian noise, and the attacker's own releases bear that out, the score is the log-likelihood ``-Σ r² / 2 std²``:
    for one record in an update no attacker with this list does better. Else three numbers of a pair are weighed as
    `Evidence` says, E_l the squared residual of a tensor of D_l entries and e_l what the truth leaves of it in releases of
    the attacker's own: ``-½ Σ D_l E_l / e_l``, ``-½ Σ D_l ln(1 + E_l / e_l)`` and ``-Σ ln(1 + E_l / e_l)``.

    Unknowns of the model start as it draws them; where the residual depends on them they are fitted, for a short list of the
    candidates that fit best without, and all others rank below.

    Cost: one replay a candidate, or one a pair where there are unknowns, in double precision. Known weakness: the model's.

    Args:
        observations: Releases under attack.
        hypotheses: The list.
        context: With the client's code.
        own: Of how many candidates the attacker makes a release to learn from.
        shortlist: Candidates of a release whose unknowns are fitted.
    """
    client = ListClient(observations[0], hypotheses, context)
    draws = [DRAWS + index for index in range(own)]
    everything = [*observations, *(client.observe(index, draw) for index, draw in enumerate(draws))]
    scorer = _Scorer(hypotheses, shortlist)
    energies = scorer.energies(everything)
    truth = torch.arange(own)
    features, optimal = _features(energies, len(observations), truth, _told(observations[0], energies, truth))
    return Evidence(
        name=OWN,
        informed=True,
        features=features[: len(observations)],
        own=features[len(observations) :],
        truth=truth,
        apart=apart_of(hypotheses, draws),
        optimal=optimal,
    )


def affordable(observations: Sequence[Observation], hypotheses: Hypotheses, own: int, seconds: float) -> tuple[int, int]:
    """Return how many releases can be looked at in some time, and of how many candidates of its own the attacker can learn.

    Without unknowns all; else the comparison of one release with all candidates is measured.
    """
    first = observations[0]
    if not _unknown(first):
        return len(observations), own
    begun = time.perf_counter()
    _Scorer(hypotheses, SHORTLIST).energies([first])
    rows = int(seconds / (time.perf_counter() - begun))
    own = min(own, max(LEAST, rows // 4))
    return min(len(observations), max(LEAST, rows - own)), own


def _unknown(observation: Observation) -> bool:
    return bool(observation.adversary.variables(observation, torch.Generator().manual_seed(0)))


@dataclass(frozen=True)
class _Energies:
    """Squared residuals (R, N, L), what they are of (R, L), entries (L,), and pairs that were ruled out (R, N)."""

    residuals: Tensor
    observed: Tensor
    entries: Tensor
    ruled_out: Tensor


def _told(observation: Observation, energies: _Energies, truth: Tensor) -> float | None:
    """Return the standard deviation of the noise, where the adversary tells it and the truth leaves that much."""
    std = observation.adversary.arrives(observation).noise_std
    if not std or not len(truth):
        return std or None
    left = energies.residuals[-len(truth) :][torch.arange(len(truth)), truth].sum(1).mean() / energies.entries.sum()
    return std if abs(float(left) / std**2 - 1) < LAW_HOLDS else None


def _features(energies: _Energies, attacked: int, truth: Tensor, std: float | None) -> tuple[Tensor, bool]:
    if std is not None:
        likelihood = -energies.residuals.sum(2, keepdim=True) / (2 * std**2)
        return likelihood, True
    own = energies.residuals[attacked:][torch.arange(len(truth)), truth]  # (S, L)
    sizes = energies.observed.mean(0)
    floor = ROUNDING**2 * sizes + TINY
    usual = (own.mean(0) if len(truth) else torch.zeros_like(sizes)) + floor
    ratio = energies.residuals / usual
    entries = energies.entries
    numbers = [-0.5 * (entries * ratio).sum(2), -0.5 * (entries * ratio.log1p()).sum(2), -ratio.log1p().sum(2)]
    found = torch.stack(numbers, -1)
    lowest = found.amin(1, keepdim=True) - 1
    return torch.where(energies.ruled_out[..., None], 2 * lowest - 1, found), False


@dataclass
class _Scorer:
    hypotheses: Hypotheses
    shortlist: int

    def energies(self, observations: Sequence[Observation]) -> _Energies:
        """Compare all releases with all candidates."""
        return self._pair_by_pair(observations) if _unknown(observations[0]) else self._replayed_once(observations)

    def _replayed_once(self, observations: Sequence[Observation]) -> _Energies:
        """What is replayed depends on no release, so each candidate is replayed once and compared with all releases."""
        first = observations[0]
        learners = _doubled(first)
        seen = [_seen(observation) for observation in observations]
        columns, told, plain = [], None, False
        entries = sum(value.numel() for each in first.updates for value in each.weights.values())
        block = max(1, min(BLOCK, COMPARED_ENTRIES // max(1, entries)))
        for start in range(0, len(self.hypotheses), block):
            many = [self._replayed(first, learners, i) for i in range(start, min(start + block, len(self.hypotheses)))]
            if start == 0:
                plain = _is_plain(first.adversary, seen[0], many[0])
            if plain:
                found, told = _distances(seen, many)
            else:
                parts = [_compared(first.adversary, seen, each) for each in many]
                found, told = torch.stack([part for part, _ in parts], 1), parts[0][1]
            columns.append(found)
        assert told is not None
        residuals = torch.cat(columns, 1)
        return _Energies(residuals, told[0], told[1], torch.zeros(residuals.shape[:2], dtype=torch.bool))

    def _replayed(self, first: Observation, learners: Sequence[Learner], index: int) -> list[Named]:
        inputs, labels = _batch(self.hypotheses, index, learners[0].device)
        found = [first.adversary.replay(learner, inputs, labels, {}) for learner in learners]
        return [{n: v.detach() for n, v in each.items()} for each in found]

    def _pair_by_pair(self, observations: Sequence[Observation]) -> _Energies:
        batches = [_batch(self.hypotheses, index, observations[0].learner.device) for index in range(len(self.hypotheses))]
        inputs, labels = torch.stack([x for x, _ in batches]).double(), torch.stack([y for _, y in batches])
        rows = [self._of_one(observation, inputs, labels) for observation in observations]
        residuals, observed, entries, out = zip(*rows, strict=True)
        return _Energies(torch.stack(residuals), torch.stack(observed), entries[0], torch.stack(out))

    def _of_one(self, observation: Observation, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        residuals, observed, _ = compare_candidates(observation, inputs, labels, [{} for _ in inputs], refit=False)
        entries = torch.tensor([float(value[0].numel()) for value in residuals.values()], dtype=torch.float64)
        found, sizes = _by_tensor(residuals), _by_tensor(observed)[0]
        rank = _unlike(residuals, observed).argsort()[: self.shortlist]
        fitted, *_ = compare_candidates(observation, inputs[rank], labels[rank], [{} for _ in rank])
        again = _by_tensor(fitted)
        out = torch.zeros(len(inputs), dtype=torch.bool)
        if not torch.allclose(again, found[rank]):
            out = torch.ones_like(out).index_fill(0, rank, False)
            found = found.index_copy(0, rank, again)
        return found, sizes, entries, out


def _by_tensor(named: Named) -> Tensor:
    return torch.stack([value.square().reshape(len(value), -1).sum(1) for value in named.values()], 1).cpu()


def _unlike(residuals: Named, observed: Named) -> Tensor:
    """Return one minus the squared cosine between what candidates give and what was seen: unknowns may be factors."""
    both, own, seen = (torch.zeros(len(next(iter(residuals.values()))), dtype=torch.float64) for _ in range(3))
    for name, residual in residuals.items():
        theirs = observed[name].reshape(len(residual), -1)
        ours = residual.reshape(len(residual), -1) + theirs
        both, own = both + (ours * theirs).sum(1).cpu(), own + ours.square().sum(1).cpu()
        seen = seen + theirs.square().sum(1).cpu()
    return 1 - both.square() / (own * seen).clamp_min(TINY)


def _in_double(evidence: Named) -> Named:
    return {name: value.double() if value.is_floating_point() else value for name, value in evidence.items()}


def _is_plain(adversary: AdversaryModel, seen: list[Named], replayed: list[Named]) -> bool:
    """Whether the model compares what was seen with what is replayed entry by entry, as they are."""
    for evidence, simulated in zip(map(_in_double, seen), replayed, strict=True):
        found = adversary.compare(evidence, simulated, {})
        if found.simulated.keys() != simulated.keys() or found.observed.keys() != simulated.keys():
            return False
        if any(found.simulated[n] is not v or found.observed[n] is not evidence.get(OBSERVED + n) for n, v in simulated.items()):
            return False
    return True


def _distances(seen: list[list[Named]], many: list[list[Named]]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return what `_compared` does of a few candidates (R, b, L) by products of matrices."""
    found, sizes, entries = [], [], []
    for index, tensors in enumerate(many[0]):
        for name, like in tensors.items():
            distance, square = like.new_zeros(len(seen), len(many)), like.new_zeros(len(seen))
            step = max(1, COLUMNS // len(seen))
            for start in range(0, like.numel(), step):
                part = slice(start, start + step)
                y = torch.stack([each[index][OBSERVED + name].reshape(-1)[part] for each in seen]).double()
                s = torch.stack([each[index][name].reshape(-1)[part] for each in many])
                own = y.square().sum(1)
                distance += own[:, None] + s.square().sum(1) - 2 * y @ s.T
                square += own
            found.append(distance.clamp_min(0).cpu())
            sizes.append(square.cpu())
            entries.append(float(like.numel()))
    return torch.stack(found, 2), (torch.stack(sizes, 1), torch.tensor(entries, dtype=torch.float64))


def _compared(adversary: AdversaryModel, seen: list[list[Named]], replayed: list[Named]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return (R, L) squared residuals of one candidate beside all releases, what they are of (R, L), and entries (L,)."""
    rows = max(1, COMPARED_ENTRIES // max(1, sum(v.numel() for each in replayed for v in each.values())))
    found, sizes = [], []
    entries = torch.empty(0)
    for start in range(0, len(seen), rows):
        residuals: Named = {}
        observed: Named = {}
        for index, simulated in enumerate(replayed):
            evidence = stack([each[index] for each in seen[start : start + rows]])

            def one(own: Named, ours: Named = simulated) -> tuple[Named, Named]:
                comparison = adversary.compare(own, ours, {})
                return comparison.residuals(), dict(comparison.observed)

            left, right = vmap(one)(_in_double(evidence))
            residuals |= with_prefix(left, f"{index}|")
            observed |= with_prefix(right, f"{index}|")
        found.append(_by_tensor(residuals))
        sizes.append(_by_tensor(observed))
        entries = torch.tensor([float(value[0].numel()) for value in residuals.values()], dtype=torch.float64)
    return torch.cat(found), (torch.cat(sizes), entries)


def _batch(hypotheses: Hypotheses, index: int, device: torch.device) -> tuple[Tensor, Tensor]:
    inputs, labels = hypotheses.batch(index, 0)
    return inputs.to(device).double(), labels.to(device)


def _doubled(observation: Observation) -> list[Learner]:
    return [quicker(learner.to(torch.float64), observation.input_shape) for learner in observation.learners]


def _seen(observation: Observation) -> list[Named]:
    return [observation.adversary.evidence(observation, index) for index in range(len(observation.updates))]
