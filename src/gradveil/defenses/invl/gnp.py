"""InvL-GNP: noise on the update, only along the middle left singular vectors of an average Jacobian."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradveil.adversary import OpenAdversary, prefixed, with_prefix
from gradveil.defenses.base import DEFENSES, ClientView, Defense, DefenseCard, Need, State
from gradveil.defenses.invl.gnp_adversary import SubspaceUpdateAdversary
from gradveil.defenses.invl.singular_noise import (
    QUICK,
    BasisMode,
    Rule,
    average_jacobian,
    check_basis,
    check_share,
    class_centres,
    noise_range,
    public_centres,
)
from gradveil.defenses.parts.recent import Recent, content_of
from gradveil.defenses.parts.strength import noise_std
from gradveil.errors import BadUpdate, UsageError
from gradveil.learning.learner import Learner
from gradveil.randomness import Seed
from gradveil.records import Batch, Update
from gradveil.study.checks import check_choice, check_flag, check_number, check_whole
from gradveil.tensors import check_finite, unflatten

__all__ = ["InvLGNP"]

_BASES: Recent[Tensor] = Recent(2)
MADE, SCALED, CENTRES, LABELS, WEIGHTS = "made", "scaled", "centres", "labels", "weights/"


@DEFENSES.register(
    DefenseCard(
        name="invl_gnp",
        summary="Adds Gaussian noise to the update, only along the middle left singular vectors of the class centres' average "
        "Jacobian (InvL-GNP).",
        paper="Xu et al., From Risk to Resilience: Towards Assessing and Mitigating the Risk of Data Reconstruction Attacks in "
        "Federated Learning, USENIX Security 2025",
        url="https://www.usenix.org/conference/usenixsecurity25/presentation/xu-xiangrui",
        cost="one average Jacobian and the eigenvectors of an m × m matrix (m input values) per refresh interval, and one "
        "forward product a round",
        weakness="all but a few of the update's dimensions carry no noise at all: who can guess the basis compares there, and "
        "without clipping there is no differential-privacy guarantee",
        acts_on=("update",),
        ladder=({"delta": 1e-6}, {"delta": 1e-4}, {"delta": 1e-2}, {"delta": 0.25}),
        off={"delta": 0.0},
        random=True,
    )
)
@dataclass(frozen=True, kw_only=True)
class InvLGNP(Defense):
    """Noise in part of the left singular subspace: ``sent = u + U_{j:k} U_{j:k}ᵀ ε``, ε ~ N(0, δ I).

    Ḡ = mean over classes c of d(gradient)/d(input) at (μ_c, c) = U Σ Vᵀ, with μ_c the mean input of the client's records of class
    c; classes it has no record of are skipped. k is the least number of singular values that sum to 95 % of all, j to 60 %. An
    inverter of rank k divides noise along u_i by σ_i (Theorem 3), so noise along the largest costs accuracy and protects little,
    and noise beyond k is not felt.

    U is never formed: the noise is Ḡ (V Σ⁻¹ n) on the kept range with n ~ N(0, δ I), one forward product, of the same law.

    Departs from the paper: it does not say whose class centres, what becomes of absent classes, nor how often Ḡ is made; here
    they are as above, and Ḡ is made every ``refresh`` rounds. ``rule`` offers other readings of "95 %" and "60 %". Where the
    spectrum is so steep that j would reach k, one direction keeps its noise. Where training takes several steps, noise is added
    once, to the update, in its own units. A client with one record has that record as its centre: then Ḡ is the record's
    own Jacobian, as in Theorem 3, and nobody else can compute it. ``centres="public"`` takes the mean public input for every
    class instead.

    Cost: a spectrum per refresh. ``mode="leading"`` finds at most ``most`` vectors by Lanczos, for large models. The
    client keeps m (k - j) numbers and the weights Ḡ was made at. Known weakness: `SubspaceUpdateAdversary`.

    Attributes:
        delta: Variance δ of the noise along each direction, in units of the update squared, as the paper has it; 0 is off.
        variance: False reads ``delta`` as a standard deviation.
        share: Share of the singular values up to which there is noise.
        spared: Share of the leading ones without noise; 0 starts at the first.
        rule: What the shares are of: the ``sum`` of singular values, their ``energy`` (squares), or their ``count``.
        refresh: Rounds a basis is kept.
        centres: ``own`` class means, or the ``public`` mean for every class.
        mode: How Ḡ is decomposed: ``auto``, ``dense``, ``gram`` or ``leading``.
        most: Most directions that are looked for.
    """

    delta: float = 0.25
    variance: bool = True
    share: float = 0.95
    spared: float = 0.6
    rule: Rule = "sum"
    refresh: int = 1
    centres: Literal["own", "public"] = "own"
    mode: BasisMode = "auto"
    most: int = 4096

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing."""
        check_number("invl_gnp", "delta", self.delta)
        check_flag("invl_gnp", "variance", self.variance)
        check_share("invl_gnp", "share", self.share)
        check_share("invl_gnp", "spared", self.spared)
        if self.spared >= self.share:
            raise UsageError(f"invl_gnp: spared is {self.spared} and share {self.share}; noise needs room between them")
        check_basis("invl_gnp", self.rule, self.mode, self.most)
        check_whole("invl_gnp", "refresh", self.refresh, 1)
        check_choice("invl_gnp", "centres", self.centres, ("own", "public"))

    @property
    def std(self) -> float:
        """Standard deviation of the noise along each direction."""
        return noise_std(self.delta, self.variance)

    def protect_update(self, update: Update, view: ClientView, state: State) -> tuple[Update, State]:
        """Add the noise; the same seed, round and position in a chain give the same bits."""
        check_finite(update.weights)
        if self.std == 0:
            return update, state
        _check_names(update, view.learner)
        if MADE not in state or not 0 <= view.round - int(state[MADE]) < self.refresh:
            state = self._made(view)
        # At the weights the basis was made at: elsewhere Ḡ V Σ⁻¹ would not be orthonormal.
        learner = view.learner.replace(weights=prefixed(state, WEIGHTS))
        scaled = state[SCALED]
        generator = view.generator("invl_gnp")
        drawn = torch.randn(len(scaled), generator=generator, device=scaled.device, dtype=scaled.dtype)
        if len(scaled) == 0:
            return update, state
        jacobian = average_jacobian(learner, state[CENTRES], state[LABELS])
        noise = unflatten(jacobian.push((self.std * drawn @ scaled).unsqueeze(0))[0], learner.weights)
        weights = {name: value + noise[name].to(value) for name, value in update.weights.items()}
        return update.replace(weights=weights), state

    def _made(self, view: ClientView) -> State:
        """Return a fresh basis, and where and when it was made."""
        batch = view.raw_batch
        if batch is None:
            raise UsageError("invl_gnp needs the client's records for its class centres, and none were handed to it")
        centres, labels = self.centres_of(batch, view)

        def make() -> Tensor:
            jacobian = average_jacobian(view.learner, centres, labels)
            seed = view.seed if self.centres == "own" else Seed(0)  # so that all clients find the same bits
            shares = {"low": self.spared, "high": self.share}
            return noise_range(jacobian, **shares, rule=self.rule, mode=self.mode, most=self.most, seed=seed).scaled

        # Public centres are everybody's: who runs several clients makes their basis once.
        scaled = make() if self.centres == "own" else _BASES.get((view.learner.content, content_of(view.public), self), make)
        made = {MADE: torch.tensor([view.round]), SCALED: scaled, CENTRES: centres, LABELS: labels}
        return made | with_prefix(view.learner.weights, WEIGHTS)

    def centres_of(self, batch: Batch, view: ClientView) -> tuple[Tensor, Tensor]:
        """Return the inputs Ḡ is averaged over, and their labels."""
        if self.centres == "own":
            return class_centres(batch.inputs, batch.targets, "invl_gnp")
        if view.public is None:
            raise UsageError("invl_gnp: centres='public' needs public inputs, and there are none; set centres='own'")
        return public_centres(view.learner, view.public)

    def quick(self) -> Defense:
        """Return the same with noise along a few leading directions, which are found without a whole decomposition.

        The range proper begins after hundreds of them; sparing its share would leave nothing for the noise.
        """
        return dataclasses.replace(self, spared=0.0, mode="leading", most=min(self.most, QUICK))

    def needs(self) -> frozenset[Need]:
        """Ask for the records behind the class centres and the loss of the Jacobian; for public inputs where they are centres."""
        if self.std == 0:
            return super().needs()
        own: set[Need] = {"batch", "loss", "public"} if self.centres == "public" else {"batch", "loss"}
        return super().needs() | own

    def adversary(self) -> OpenAdversary:
        """Return the attacker who compares where there is no noise."""
        if not self.std:
            return OpenAdversary()
        return SubspaceUpdateAdversary(
            std=self.std,
            share=self.share,
            spared=self.spared,
            rule=self.rule,
            mode=self.mode,
            most=self.most,
            shared=self.centres == "public",
        )


def _check_names(update: Update, learner: Learner) -> None:
    """Refuse updates of another model: its singular vectors say nothing about them."""
    shapes = {name: tuple(value.shape) for name, value in update.weights.items()}
    if shapes != {name: tuple(value.shape) for name, value in learner.weights.items()}:
        raise BadUpdate("invl_gnp shapes its noise by the model's gradient, and this update has other tensors than the model")
