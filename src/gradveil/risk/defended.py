"""What a defense leaves of a record for the attacker who knows it, as a Jacobian and noise: what `gradveil.risk.exposure` scores.

Everything is taken from that attacker (`Defense.adversary`): what he compares with decides whose Jacobian is taken; Gaussian
noise of known strength is told apart; what he cannot see is noted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradveil import tensors
from gradveil.client.send import send
from gradveil.defenses import Defense, parts_of, spell_defense
from gradveil.defenses.data_noise import DataNoise
from gradveil.defenses.embedding_noise import EmbeddingNoise
from gradveil.defenses.gaussian_noise import GaussianNoise
from gradveil.defenses.invl.dnp import InvLDNP
from gradveil.defenses.invl.enp import InvLENP
from gradveil.defenses.invl.gnp import InvLGNP
from gradveil.defenses.invl.singular_noise import noisy_ranks
from gradveil.learning import Learner
from gradveil.learning.embedding import EmbeddingLearner
from gradveil.randomness import Seed
from gradveil.records import Batch, Observation, ThreatModel
from gradveil.risk.invloss import RankVariances
from gradveil.spectra.jacobians import Jacobian, Law, Own, check_records_are_separate, gradient_law
from gradveil.spectra.spectrum import Spectrum
from gradveil.tensors import Named

__all__ = ["DefendedRelease", "Releases", "defended_release"]

UNKNOWN_LAW = "the defense draws randomness of unknown law, which the score takes as known to the attacker"
Directed = InvLDNP | InvLGNP | InvLENP


@dataclass(frozen=True, eq=False)
class DefendedRelease:
    """What is known about the release of one record under a defense.

    Attributes:
        jacobian: Of what the informed attacker compares.
        data_noise: Standard deviation of noise on the input.
        shared_noise: Standard deviation of noise on what is sent.
        notes: What the linearisation does not see, in sentences.
        plain: Whether the Jacobian is that of the update without the defense.
        directed: Parts of the defense whose noise lies along singular vectors of this Jacobian.
        sent: What was sent, decoded; None where nothing was.
        blind: Why the attacker behind the Jacobian is no measure of the defense; empty where he is.
        random: Whether the defense draws something that is neither noise of known law nor noise on the data.
    """

    jacobian: Jacobian
    data_noise: float
    shared_noise: float
    notes: tuple[str, ...]
    plain: bool = False
    directed: tuple[Directed, ...] = ()
    sent: Named | None = None
    blind: str = ""
    random: bool = False

    def noise_on(self, where: str, measured: Spectrum) -> float | RankVariances:
        """Return the noise on ``data`` or on what is ``shared``: its standard deviation, or its variance along each direction."""
        even = self.data_noise if where == "data" else self.shared_noise
        own = [part for part in self.directed if isinstance(part, InvLDNP) == (where == "data")]
        if not own:
            return even
        variances = torch.full((len(measured.values),), even**2, dtype=torch.float64)
        for part in own:
            low = 0.0 if isinstance(part, InvLDNP) else part.spared
            first, last = noisy_ranks(measured, low=low, high=part.share, rule=part.rule, most=part.most)
            variances[first:last] += part.std**2
        return RankVariances(variances)


def defended_release(
    learner: Learner, record: Tensor, target: Tensor, defense: Defense, seed: Seed, *, dtype: torch.dtype = torch.float64
) -> DefendedRelease:
    """Let a client send one record under a defense, and linearise what the attacker who knows the defense compares.

    Args:
        learner: The client's training, with the model as the defense adapts it.
        record: One input, without batch axis.
        target: Its label.
        defense: What protects it.
        seed: Of the client's randomness.
        dtype: Precision of the Jacobian.
    """
    return Releases(learner, defense).of(record, target, seed, dtype)


class Releases:
    """The releases of one client under one defense: of all records one function, so that their products can go together."""

    def __init__(self, learner: Learner, defense: Defense) -> None:
        """Ask the defense for its attacker; refuse models in which records are not separate."""
        check_records_are_separate(learner)
        self.learner, self.defense, self.adversary = learner, defense, defense.adversary()
        self.directed = _directed(defense, learner)
        self.device = learner.device
        self._laws: dict[tuple[torch.dtype, bool], Law] = {}

    def _law(self, dtype: torch.dtype, plain: bool) -> Law:
        """Return what is shared in a precision: what the client sends, or what the attacker makes of it."""
        if (dtype, plain) not in self._laws:
            learner = self.learner.to(dtype)
            self._laws[dtype, plain] = gradient_law(learner) if plain else self._replayed(learner)
        return self._laws[dtype, plain]

    def _replayed(self, learner: Learner) -> Law:
        def share(x: Tensor, own: Own) -> Named:
            label, evidence, variables = own
            simulated = self.adversary.replay(learner, x.unsqueeze(0), label["target"], variables)
            return self.adversary.compare(evidence, simulated, variables).simulated

        return Law(share)

    def other(self, release: DefendedRelease, record: Tensor, target: Tensor) -> Tensor | Named:
        """Return what an attacker who saw a release would compare with it for another record."""
        jacobian = release.jacobian
        assert jacobian.law is not None
        point = record.to(self.device).to(jacobian.at.dtype)
        label, *more = jacobian.own
        own = ({**label, "target": target.unsqueeze(0).to(self.device)}, *more)
        with torch.no_grad():
            return jacobian.law.share(point, own)

    def of(self, record: Tensor, target: Tensor, seed: Seed, dtype: torch.dtype) -> DefendedRelease:
        """Return the release of one record."""
        batch = Batch(record.unsqueeze(0).to(self.device), target.unsqueeze(0).to(self.device))
        # A copy of its own, also where it has the precision already: tangents take the whole storage of their point.
        point, label = batch.inputs[0].to(dtype, copy=True), {"target": batch.targets}
        if self.directed:
            jacobian = self._law(dtype, plain=True).jacobian(point, (label,), batch.targets)
            return _directed_release(self.directed, self.learner, self.defense, jacobian)
        learner, adversary = self.learner, self.adversary
        result = send(learner, batch, self.defense, seed)
        observation = Observation(
            learners=(learner,),
            updates=(result.update,),
            payloads=(result.payload,),
            input_shape=tuple(record.shape),
            classes=learner.classes(batch.inputs),
            examples=1,
            threat=ThreatModel(sees="embedding" if isinstance(learner, EmbeddingLearner) else "update"),
            adversary=adversary,
            labels=batch.targets,
        )
        data_noise = math.hypot(*(part.std for part in parts_of(self.defense) if isinstance(part, DataNoise)))
        told = adversary.arrives(observation)
        known_noise, plain, incomplete = told.noise_std, told.plain_search, told.incomplete
        notes = _notes(self.defense, plain, incomplete, data_noise, known_noise)
        if plain and not learner.noise:
            jacobian = self._law(dtype, plain=True).jacobian(point, (label,), batch.targets)
            return self._told(DefendedRelease(jacobian, data_noise, known_noise or 0.0, notes, plain=True), result.update.weights)
        evidence = tensors.to(adversary.evidence(observation, 0), dtype)
        drawn = adversary.variables(observation, seed.child("risk").generator("unknowns", device=self.device))
        jacobian = self._law(dtype, plain=False).jacobian(point, (label, evidence, tensors.to(drawn, dtype)))
        return self._told(DefendedRelease(jacobian, data_noise, known_noise or 0.0, notes), result.update.weights)

    def _told(self, release: DefendedRelease, sent: Named) -> DefendedRelease:
        blind = next((note for note in release.notes if note != UNKNOWN_LAW), "")
        return replace(release, sent=sent, blind=blind, random=UNKNOWN_LAW in release.notes)


def _directed(defense: Defense, learner: Learner) -> tuple[Directed, ...]:
    """Return the parts with noise along the record's own singular vectors, where nothing but Gaussian noise is added."""
    vertical = isinstance(learner, EmbeddingLearner)
    shared, even = (InvLENP, EmbeddingNoise) if vertical else (InvLGNP, GaussianNoise)
    acting = [part for part in parts_of(defense) if part.stations()]
    found = tuple(part for part in acting if isinstance(part, (InvLDNP, shared)))
    others = any(not isinstance(part, (InvLDNP, DataNoise, shared, even)) for part in acting)
    return () if others or learner.noise else found


def _directed_release(directed: tuple[Directed, ...], learner: Learner, defense: Defense, jacobian: Jacobian) -> DefendedRelease:
    """Return the release without sending anything: whoever has one record takes that record's own singular vectors."""
    on_data = [part.std for part in parts_of(defense) if isinstance(part, DataNoise)]
    on_shared = [part.std for part in parts_of(defense) if isinstance(part, EmbeddingNoise)]
    on_shared += [part.own_std for part in parts_of(defense) if isinstance(part, GaussianNoise)]
    steps = learner.settings.steps(1) if learner.settings.shares == "weights" else 1
    public = any("public" in (getattr(part, "centres", ""), getattr(part, "basis", "")) for part in directed)
    found = []
    if steps > 1:
        found.append("the noise follows the gradient's singular vectors, taken here as those of the update of several steps")
    if public:
        found.append("the noise follows the singular vectors of public inputs, taken here as the record's own")
    return DefendedRelease(jacobian, math.hypot(*on_data), math.hypot(*on_shared), tuple(found), plain=True, directed=directed)


def _notes(defense: Defense, plain: bool, incomplete: bool, data_noise: float, known_noise: float | None) -> tuple[str, ...]:
    found = []
    acting = [part for part in parts_of(defense) if part.stations()]
    unseen = plain and not data_noise and known_noise is None
    if acting and unseen:
        found.append(f"the score does not see what {spell_defense(defense)} does: no linear attacker of it is known")
    elif any(part.random for part in acting) and not data_noise and known_noise is None:
        found.append(UNKNOWN_LAW)
    if incomplete:
        found.append("the attacker behind the score knows less than the whole defense")
    return tuple(found)
