"""GradDefense: noise on a random half of the slices into which sensitivity to the inputs divides the weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from gradveil.adversary import OBSERVED, OpenAdversary, prefixed, with_prefix
from gradveil.defenses.base import DEFENSES, ClientView, Defense, DefenseCard, Need, State
from gradveil.defenses.graddefense.compensation import denoise_update
from gradveil.defenses.graddefense.sensitivity import cut_slices, layer_sensitivity, root_inputs, slice_of_entries
from gradveil.defenses.parts.recent import Recent, content_of
from gradveil.learning.learner import Learner
from gradveil.records import Batch, Comparison, Observation, Update, WhatArrives
from gradveil.study.checks import check_flag, check_number, check_whole
from gradveil.tensors import Named, check_finite, flatten, unflatten

__all__ = ["GradDefense", "GradDefenseAdversary", "noise_cannot_explain"]

CUTS = "cuts"
TRUST = "trust/"
ASPECT = 6.0
"""Rows over columns of the matrix in which the server compensates; the released code's Q."""
LOUDEST = 0.3
"""Noise that the attacker lets into its comparison, over the norm of what arrived exactly."""
DOUBT = 1e-4
"""Chance with which a slice that carries noise may be taken for one that arrived exactly."""


def noise_cannot_explain(seen: Tensor, std: float, clip: float | None = None) -> bool:
    """Return whether a slice arrived exactly, because Gaussian noise of this size would have left other entries.

    Whatever lies below, noise makes entries larger than noise alone: |u + s z| exceeds every level at least as often as |s
    z|. So a slice with more small entries than noise alone would leave carries none; the inequality of Dvoretzky, Kiefer,
    Wolfowitz and Massart says how many more are no accident. Where the noisy slices were clipped first they are little more
    than noise, so a slice with too many large entries arrived exactly as well.
    """
    count = seen.numel()
    if count == 0:
        return False
    magnitudes = seen.detach().reshape(-1).abs().double().sort().values
    chance = torch.special.erf(magnitudes / (std * math.sqrt(2)))
    rank = torch.arange(1, count + 1, dtype=torch.float64, device=chance.device) / count
    slack = math.sqrt(math.log(1 / DOUBT) / (2 * count))
    if float((rank - chance).max()) > slack:
        return True
    if clip is None:
        return False
    # Entries of norm ``clip`` in total move the distribution of the magnitudes by at most this.
    moved = 0.4 * clip / (std * math.sqrt(count))
    return float((chance - rank + 1 / count).max()) > slack + moved


def _cuts_of(learner: Learner, shape: tuple[int, ...], slices: int, public: Tensor | None) -> tuple[int, ...]:
    """Cut a model's weights."""
    sizes = {name: value.numel() for name, value in learner.weights.items()}
    return tuple(cut_slices(sizes, layer_sensitivity(learner, root_inputs(shape, public)), slices))


_CUTS: Recent[tuple[int, ...]] = Recent(4)
"""For attackers, who ask again and again for the same model; a client asks once."""


@dataclass(frozen=True)
class GradDefenseAdversary(OpenAdversary):
    """Cuts the same slices, tells from each slice's entries whether noise lies on it, and trusts those without.

    The slices follow from the model and the root set, which is public; which half gets noise is secret. Slices that noise cannot
    explain count in full. Others count by their share of signal, since noise much smaller than the signal cannot be told and
    does not matter, and by so little that their noise cannot outweigh what arrived exactly. In an aggregate every client has
    its own noisy half, so all entries are noisy, with the mean variance.
    """

    std: float
    slices: int
    noisy: int
    clip: float | None

    def arrives(self, observation: Observation) -> WhatArrives:
        """Tell the noise of an aggregate; of one client, whose entries are noisy or exact, which tensors are exact.

        Incomplete with clipping: over several steps the clipped slices change the path, and the replay does not clip.
        """
        told, clients = super().arrives(observation).replace(incomplete=self.clip is not None), observation.threat.clients
        if clients == 1:
            return told.replace(exact=lambda: self._exact(observation))
        return told.replace(exact=frozenset, noise_std=self.std * math.sqrt(self.noisy / self.slices / clients))

    def evidence(self, observation: Observation, round_index: int) -> Named:
        """Return the update and how far each entry is trusted."""
        seen = observation.updates[round_index].weights
        row, cuts = flatten(seen), self._cuts(observation)
        trust = self._trust(row, cuts) if observation.threat.clients == 1 else torch.ones(self.slices).to(row)
        return with_prefix(seen, OBSERVED) | with_prefix(unflatten(trust[slice_of_entries(cuts).to(row.device)], seen), TRUST)

    def compare(self, evidence: Named, simulated: Named, variables: Named) -> Comparison:
        """Compare entries as far as they are trusted."""
        trust, seen = prefixed(evidence, TRUST), prefixed(evidence, OBSERVED)
        return Comparison({n: v * trust[n] for n, v in simulated.items()}, {n: v * trust[n] for n, v in seen.items()})

    def _exact(self, observation: Observation) -> frozenset[str]:
        """Return the tensors that lie in slices which noise cannot explain."""
        seen, cuts = observation.update.weights, self._cuts(observation)
        sure = self._sure(flatten(seen), cuts)
        begin, names = 0, set()
        for name, value in seen.items():
            end = begin + value.numel()
            touched = [ok for ok, (left, right) in zip(sure, pairwise(cuts), strict=True) if left < end and right > begin]
            if touched and all(touched):
                names.add(name)
            begin = end
        return frozenset(names)

    def _cuts(self, observation: Observation) -> list[int]:
        learner, shape, public = observation.learners[0], tuple(observation.input_shape), observation.public
        key = learner.content, shape, self.slices, content_of(public)
        return list(_CUTS.get(key, lambda: _cuts_of(learner, shape, self.slices, public)))

    def _sure(self, row: Tensor, cuts: list[int]) -> list[bool]:
        return [noise_cannot_explain(row[left:right], self.std, self.clip) for left, right in pairwise(cuts)]

    def _trust(self, row: Tensor, cuts: list[int]) -> Tensor:
        sure = self._sure(row, cuts)
        parts = [row[left:right].double() for left, right in pairwise(cuts)]
        exact = math.sqrt(math.fsum(float(part.square().sum()) for part, ok in zip(parts, sure, strict=True) if ok))
        entries = sum(part.numel() for part, ok in zip(parts, sure, strict=True) if not ok)
        # A comparison adds up all entries, so noise that outweighs what arrived exactly would hide it.
        quiet = min(1.0, LOUDEST * exact / (self.std * math.sqrt(entries))) if exact and entries else 1.0
        trust = [1.0 if ok else quiet * self._signal_share(part) for part, ok in zip(parts, sure, strict=True)]
        return torch.tensor(trust if any(trust) else [1.0] * self.slices).to(row)

    def _signal_share(self, part: Tensor) -> float:
        """Return the share of a noisy slice's power that is signal: nothing where it was clipped before, or has no entries."""
        if self.clip is not None or part.numel() == 0:
            return 0.0
        power = float(part.square().mean())
        return max(0.0, power - self.std**2) / power if power else 0.0


@DEFENSES.register(
    DefenseCard(
        name="graddefense",
        summary="Adds Gaussian noise to a random half of the weights, cut into slices of equal sensitivity to the inputs.",
        paper="Wang, Guo, Xie and Qi, Protect Privacy from Gradient Leakage Attack in Federated Learning, INFOCOM 2022",
        url="https://github.com/wangjunxiao/GradDefense",
        cost="once per client, one backward pass through the gradient per tensor, on eight public inputs; one random number per "
        "noisy weight; the server solves one eigenvalue problem per round",
        weakness="half of the slices arrive exactly, and which ones is seen from their entries; the sum of a softmax layer's "
        "gradient is always zero, so the last layer counts as insensitive, falls into one slice and arrives exactly every other "
        "time",
        acts_on=("gradient", "update", "aggregation"),
        ladder=({"std": 1e-4}, {"std": 1e-3}, {"std": 1e-2}, {"std": 1e-1}),
        off={"std": 0.0},
        random=True,
    )
)
@dataclass(frozen=True, kw_only=True)
class GradDefense(Defense):
    """GradDefense: ``sent_k = u_k + N(0, std²)`` for ``noisy`` of ``slices`` slices k, drawn anew every round.

    The sensitivity of a tensor is the mean over a root set of ``‖d(Σ g) / dx‖``. All weights stand in a row, which is cut
    into slices of equal sensitivity at multiples of the greatest common divisor of the tensors' sizes. With ``clip`` the part
    of every example's gradient that lies in the noisy slices is clipped first, slice by slice, at every local step. The
    server knows how much noise its mean carries, writes it as a matrix, and keeps the directions whose eigenvalues lie
    outside the Marchenko-Pastur edges ``std² (1 ± √(columns / rows))²``.

    Departs from the paper: the paper's text was not at hand, so this follows the released code, except in five places. Noisy
    slices come from the client's secret generator (released: seed 0, so everybody knows them). Noise is added once, to the
    update. Cuts are at equal parts of the sensitivity and slices do not overlap (released: a greedy filling whose last slice
    gets the rest, and one entry at each cut gets noise twice). The server's noise is ``std² · noisy / slices · Σ w²`` for
    shares w (released: multiplied by the number of clients instead of divided, which on a LeNet with ten clients makes the
    error larger than no compensation). The root set is the first eight public inputs, or uniform noise where there are none.

    Cost: see the card. Known weakness: what arrives exactly is enough. The attacker is `GradDefenseAdversary`. Compensation
    is the server's own doing and protects nothing.

    Attributes:
        std: Standard deviation of the noise; 0 is off.
        slices: Slices of equal sensitivity.
        noisy: How many of them get noise.
        clip: Largest norm of one example's gradient within a noisy slice; None does not clip, and needs no per-example gradients.
        compensate: Whether the server takes noise off the mean.
    """

    std: float = 0.01
    slices: int = 10
    noisy: int = 5
    clip: float | None = None
    compensate: bool = True

    def __post_init__(self) -> None:
        """Refuse nonsense amounts and more noisy slices than there are."""
        check_number("graddefense", "std", self.std)
        check_whole("graddefense", "slices", self.slices, 1)
        check_whole("graddefense", "noisy", self.noisy, 0, self.slices)
        if self.clip is not None:
            check_number("graddefense", "clip", self.clip, open_below=True)
        check_flag("graddefense", "compensate", self.compensate)

    @property
    def granularity(self) -> Literal["batch", "example"]:  # type: ignore[override]
        """Single examples only where they are clipped."""
        return "batch" if self.clip is None or self._off else "example"

    @property
    def _off(self) -> bool:
        return self.std == 0 or self.noisy == 0

    def prepare(self, data: Batch, view: ClientView) -> State:
        """Cut the slices, once, at the weights the client starts from."""
        if self._off:
            return {}
        return {CUTS: torch.tensor(_cuts_of(view.learner, tuple(data.inputs.shape[1:]), self.slices, view.public))}

    def protect_gradient(self, gradient: Named, view: ClientView, state: State) -> tuple[Named, State]:
        """Clip what each example has in the noisy slices."""
        if self.granularity == "batch" or self.clip is None:
            return gradient, state
        examples = len(next(iter(gradient.values())))
        rows = torch.cat([value.reshape(examples, -1) for value in gradient.values()], dim=1)  # (examples, entries)
        cuts = self._cuts(state, entries=rows.shape[1])
        pieces = [piece.clone() for piece in rows.split([right - left for left, right in pairwise(cuts)], dim=1)]
        for index in self._chosen(view):
            length = torch.linalg.vector_norm(pieces[index], dim=1, keepdim=True, dtype=torch.float64)
            pieces[index] = pieces[index] * (self.clip / length.clamp(min=self.clip)).to(rows.dtype)
        parts = torch.cat(pieces, dim=1).split([value[0].numel() for value in gradient.values()], dim=1)
        return {n: part.reshape(v.shape) for part, (n, v) in zip(parts, gradient.items(), strict=True)}, state

    def protect_update(self, update: Update, view: ClientView, state: State) -> tuple[Update, State]:
        """Add noise to the slices drawn for this round."""
        check_finite(update.weights)
        if self._off:
            return update, state
        row = flatten(update.weights)
        where = slice_of_entries(self._cuts(state, entries=row.numel())).to(row.device)
        touched = torch.isin(where, self._chosen(view).to(row.device))
        generator = view.generator("graddefense noise")
        noise = torch.randn(row.shape, generator=generator, device=row.device, dtype=row.dtype)
        noisy = torch.where(touched, row + self.std * noise, row)
        return update.replace(weights=unflatten(noisy, update.weights)), state

    def _chosen(self, view: ClientView) -> Tensor:
        """Return the noisy slices of the round: the same at every step, known to the client alone."""
        generator = view.replace(step=0).generator("graddefense slices")
        return torch.randperm(self.slices, generator=generator, device=view.device)[: self.noisy].cpu()

    def _cuts(self, state: State, *, entries: int) -> list[int]:
        cuts: list[int] = state[CUTS].tolist() if CUTS in state else []
        # Tensors that are not the model's are cut by their number of entries.
        return cuts if cuts and cuts[-1] == entries else [entries * part // self.slices for part in range(self.slices + 1)]

    def correct_aggregate(self, total: Update, examples: Sequence[int]) -> Update:
        """Take the noise off the server's mean."""
        if self._off or not self.compensate:
            return total
        everyone = float(sum(examples))
        share = math.fsum((count / everyone) ** 2 for count in examples)
        std = self.std * math.sqrt(self.noisy / self.slices * share)
        return total.replace(weights=denoise_update(total.weights, std, ASPECT))

    def needs(self) -> frozenset[Need]:
        """Ask for the loss: slices are cut by how its gradient answers to the input."""
        return super().needs() | ({"loss"} if not self._off else set())

    def adversary(self) -> OpenAdversary:
        """Return the attacker who finds the slices without noise."""
        return OpenAdversary() if self._off else GradDefenseAdversary(self.std, self.slices, self.noisy, self.clip)
