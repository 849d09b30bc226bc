"""InvL-ENP: noise on the embedding, only along the middle left singular vectors of the bottom model's Jacobian."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from gradveil.adversary import OBSERVED, OpenAdversary
from gradveil.defenses.base import DEFENSES, ClientView, Defense, DefenseCard, Need, State
from gradveil.defenses.embedding_noise import EmbeddingAdversary
from gradveil.defenses.invl.singular_noise import (
    QUICK,
    BasisMode,
    Rule,
    check_basis,
    check_share,
    left_basis,
    noise_range,
    record_jacobian,
)
from gradveil.defenses.parts.recent import Recent, content_of
from gradveil.defenses.parts.strength import noise_std
from gradveil.errors import UsageError
from gradveil.learning.embedding import EMBEDDING, EMBEDDING_GRADIENT
from gradveil.learning.learner import Learner
from gradveil.records import Comparison, Observation, WhatArrives
from gradveil.study.checks import check_choice, check_flag, check_number, check_whole
from gradveil.tensors import Named, check_finite

if TYPE_CHECKING:
    from gradveil.spectra.jacobians import Jacobian

__all__ = ["InvLENP", "SubspaceEmbeddingAdversary"]

MADE, BASIS, TRUST = "made", "basis", "trust"
PRECISION = 1e-3
"""What the attacker takes for exact outside the subspace, as a share of what a record's embedding holds there."""
_BASES: Recent[Tensor] = Recent(2)


@DEFENSES.register(
    DefenseCard(
        name="invl_enp",
        summary="Adds Gaussian noise to the embedding a party sends, only along the middle left singular vectors of its Jacobian "
        "(InvL-ENP).",
        paper="Xu et al., From Risk to Resilience: Towards Assessing and Mitigating the Risk of Data Reconstruction Attacks in "
        "Federated Learning, USENIX Security 2025",
        url="https://www.usenix.org/conference/usenixsecurity25/presentation/xu-xiangrui",
        cost="a Jacobian of the bottom model and the eigenvectors of an m × m matrix (m input values) for every record, or once "
        "per refresh interval with basis='public'",
        weakness="all other directions of the embedding carry no noise: who can guess the basis compares there",
        acts_on=("embedding",),
        ladder=({"delta": 0.01}, {"delta": 0.1}, {"delta": 1.0}, {"delta": 4.0}),
        off={"delta": 0.0},
        random=True,
    )
)
@dataclass(frozen=True, kw_only=True)
class InvLENP(Defense):
    """Noise in part of the left singular subspace: ``sent = e + U_{j:k} U_{j:k}ᵀ ε``, ε ~ N(0, δ I), per record.

    J_x = d(embedding)/d(input) = U Σ Vᵀ of each record; k is the least number of singular values that sum to 95 % of all, j to
    60 %, as in `InvLGNP`. The noise is J (V Σ⁻¹ n) on the kept range with n ~ N(0, δ I), one forward product, of the same law.

    Departs from the paper: ``basis="public"`` is ours: one J, at the mean public input, for all records, made every ``refresh``
    rounds. It is the honest way to be faster, and its directions are not those of any record. Acts wherever embeddings leave a
    party; the paper adds noise at prediction time. Where the spectrum is so steep that j would reach k, one direction keeps
    its noise; where J is zero there is none.

    Cost: `gradveil.spectra.spectrum` per record; ``mode="leading"`` finds at most ``most`` vectors by Lanczos, for large inputs.
    Known weakness: `SubspaceEmbeddingAdversary`.

    Attributes:
        delta: Variance δ of the noise along each direction, as the paper has it; 0 is off.
        variance: False reads ``delta`` as a standard deviation.
        share: Share of the singular values up to which there is noise.
        spared: Share of the leading ones without noise; 0 starts at the first.
        rule: What the shares are of: the ``sum`` of singular values, their ``energy`` (squares), or their ``count``.
        basis: ``record``: every record's own; ``public``: that of the mean public input.
        refresh: Rounds the public basis is kept.
        mode: How J is decomposed: ``auto``, ``dense``, ``gram`` or ``leading``.
        most: Most directions that are looked for.
    """

    delta: float = 1.0
    variance: bool = True
    share: float = 0.95
    spared: float = 0.6
    rule: Rule = "sum"
    basis: Literal["record", "public"] = "record"
    refresh: int = 1
    mode: BasisMode = "auto"
    most: int = 4096

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing."""
        check_number("invl_enp", "delta", self.delta)
        check_flag("invl_enp", "variance", self.variance)
        check_share("invl_enp", "share", self.share)
        check_share("invl_enp", "spared", self.spared)
        if self.spared >= self.share:
            raise UsageError(f"invl_enp: spared is {self.spared} and share {self.share}; noise needs room between them")
        check_basis("invl_enp", self.rule, self.mode, self.most)
        check_choice("invl_enp", "basis", self.basis, ("record", "public"))
        check_whole("invl_enp", "refresh", self.refresh, 1)
        if self.refresh > 1 and self.basis == "record":
            raise UsageError(
                "invl_enp: a basis kept for several rounds is that of public inputs; set basis='public', or refresh=1"
            )

    @property
    def std(self) -> float:
        """Standard deviation of the noise along each direction."""
        return noise_std(self.delta, self.variance)

    def protect_embedding(self, embedding: Tensor, view: ClientView, state: State) -> tuple[Tensor, State]:
        """Add the noise; the same seed, round and position in a chain give the same bits."""
        check_finite({EMBEDDING: embedding}, "the embedding")
        if self.std == 0:
            return embedding, state
        generator = view.generator("invl_enp")
        if self.basis == "record":
            noise = self._own_noise(embedding, view, generator)
        else:
            if MADE not in state or not 0 <= view.round - int(state[MADE]) < self.refresh:
                state = {MADE: torch.tensor([view.round]), BASIS: self.left_basis(view.learner, _public_mean(view))}
            rows = state[BASIS]
            drawn = torch.randn((len(embedding), len(rows)), generator=generator, device=rows.device, dtype=rows.dtype)
            noise = drawn @ rows
        return embedding + self.std * noise.reshape(embedding.shape).to(embedding), state

    def _own_noise(self, embedding: Tensor, view: ClientView, generator: torch.Generator) -> Tensor:
        batch = view.batch
        if batch is None or len(batch) != len(embedding):
            raise UsageError("invl_enp needs the inputs behind the embedding, and they were not handed to it")
        noise = torch.zeros_like(embedding).reshape(len(embedding), -1)
        for index, (record, target) in enumerate(zip(batch.inputs, batch.targets, strict=True)):
            jacobian = record_jacobian(view.learner, record, target)
            scaled = self._range(jacobian)
            drawn = torch.randn(len(scaled), generator=generator, device=scaled.device, dtype=scaled.dtype)
            if len(scaled):
                noise[index] = jacobian.push((drawn @ scaled).unsqueeze(0))[0].to(noise)
        return noise

    def _range(self, jacobian: Jacobian) -> Tensor:
        found = noise_range(jacobian, low=self.spared, high=self.share, rule=self.rule, mode=self.mode, most=self.most)
        return found.scaled

    def left_basis(self, learner: Learner, record: Tensor) -> Tensor:
        """Return u_{j+1} … u_k at one input as orthonormal rows (k - j, p)."""
        jacobian = record_jacobian(learner, record, torch.zeros((), dtype=torch.long, device=record.device))
        return left_basis(jacobian, self._range(jacobian))

    def quick(self) -> Defense:
        """Return the same with noise along a few leading directions, which are found without a whole decomposition.

        The range proper begins after hundreds of them; sparing its share would leave nothing for the noise.
        """
        return dataclasses.replace(self, spared=0.0, mode="leading", most=min(self.most, QUICK))

    def needs(self) -> frozenset[Need]:
        """Ask for the inputs behind the embedding, whose Jacobians span the noise, or for the public ones in their place."""
        if self.std == 0:
            return super().needs()
        return super().needs() | ({"batch"} if self.basis == "record" else {"public"})

    def adversary(self) -> OpenAdversary:
        """Return the attacker who compares where there is no noise."""
        return SubspaceEmbeddingAdversary(self) if self.std else OpenAdversary()


def _public_mean(view: ClientView) -> Tensor:
    if view.public is None:
        raise UsageError("invl_enp: basis='public' needs public inputs, and there are none; set basis='record'")
    return view.public.to(next(iter(view.learner.weights.values()))).mean(0)


@dataclass(frozen=True)
class SubspaceEmbeddingAdversary(EmbeddingAdversary):
    """Compares embeddings where no noise was added, and by its likelihood where it was.

    As `SubspaceUpdateAdversary`: both sides as ``r - (1 - w) U Uᵀ r``, record by record, with U at the mean public input (grey
    where there is none). With ``basis="public"`` that is the party's own U; else it is a guess, and the attacker is incomplete.

    Attributes:
        defense: The defense, with its settings.
    """

    defense: InvLENP

    def arrives(self, observation: Observation) -> WhatArrives:
        """Say that it is incomplete where a record has a basis of its own, nobody has public inputs, or a gradient is seen."""
        guessed = self.defense.basis == "record" or observation.public is None
        return super().arrives(observation).replace(incomplete=guessed or EMBEDDING_GRADIENT in observation.update.weights)

    def evidence(self, observation: Observation, round_index: int) -> Named:
        """Return the embedding, the span of the noise, and each record's weight inside it."""
        seen = observation.updates[round_index].weights[EMBEDDING]
        basis = self._basis(observation.learners[round_index], observation.public, observation.input_shape).to(seen)
        flat = seen.reshape(len(seen), -1)
        exact = PRECISION * (flat - (flat @ basis.T) @ basis).norm(dim=1, keepdim=True)
        trust = exact / (exact.square() + self.defense.std**2).sqrt()
        return {OBSERVED + EMBEDDING: seen, BASIS: basis, TRUST: trust}

    def _basis(self, learner: Learner, public: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """Return the span of the noise."""
        like = next(iter(learner.weights.values()))

        def make() -> Tensor:
            mean = torch.full(shape, 0.5) if public is None else public.mean(0)
            return self.defense.left_basis(learner, mean.to(like))

        return _BASES.get((learner.content, content_of(public), shape, self.defense), make)

    def compare(self, evidence: Named, simulated: Named, variables: Named) -> Comparison:
        """Compare what the noise does not reach, and a little of what it does."""
        basis, trust = evidence[BASIS], evidence[TRUST]

        def cleared(value: Tensor) -> Tensor:
            flat = value.reshape(value.shape[0], -1)
            return (flat - (1 - trust) * ((flat @ basis.T) @ basis)).reshape(value.shape)

        return Comparison({EMBEDDING: cleared(simulated[EMBEDDING])}, {EMBEDDING: cleared(evidence[OBSERVED + EMBEDDING])})
