"""How exposed each record of a user is, without running an attack: InvRE and its companions, per record and defense.

What a defense does enters in three ways, all taken from the attacker who knows it (`Defense.adversary`):

* what he compares with (masks, projections, clipped and adapted gradients) decides whose Jacobian is taken;
* Gaussian noise of known strength on what is sent enters by Theorem 3, noise on the data by Theorem 2; where it has directions,
  as that of the InvL defenses, by its variance along each singular vector;
* what he cannot see is not counted, and a note says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from gradveil import tensors
from gradveil.defenses import (
    DataNoise,
    Defense,
    EmbeddingNoise,
    GaussianNoise,
    InvLDNP,
    InvLENP,
    InvLGNP,
    parts_of,
    spell_defense,
)
from gradveil.defenses.singular_noise import noisy_ranks
from gradveil.federation.parties import send
from gradveil.learning import Learner
from gradveil.learning.embedding import EmbeddingLearner
from gradveil.randomness import Seed
from gradveil.records import Batch, Observation, ThreatModel
from gradveil.risk.fisher import diagonal_leakage, fisher_leakage
from gradveil.risk.invloss import RankVariances
from gradveil.risk.invre import BETA, RiskScore, risk_score
from gradveil.risk.jacobians import Jacobian, check_records_are_separate, gradient_jacobian
from gradveil.risk.spectra import Spectrum, choose_mode, spectrum
from gradveil.tensors import Named

__all__ = ["Assessment", "DefendedRelease", "RecordRisk", "assess", "defended_release"]

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
    """

    jacobian: Jacobian
    data_noise: float
    shared_noise: float
    notes: tuple[str, ...]
    plain: bool = False
    directed: tuple[Directed, ...] = ()

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


@dataclass(frozen=True)
class RecordRisk:
    """One record.

    Attributes:
        row: Its row in the data.
        label: Its class; None where targets are masks.
        risk: InvRE with its parts.
        fisher: Fisher information leakage σ_1 / s; infinite without noise on what is sent.
        diagonal: dFIL; the same.
        mode: How the spectrum was computed.
        seconds: Time it took.
        notes: Sentences.
    """

    row: int
    label: int | None
    risk: RiskScore
    fisher: float
    diagonal: float
    mode: str
    seconds: float
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values; leakage without noise, which is infinite, becomes None."""
        finite = {
            name: value if math.isfinite(value) else None for name, value in (("fil", self.fisher), ("dfil", self.diagonal))
        }
        told = {"mode": self.mode, "seconds": round(self.seconds, 3), "notes": list(self.notes)}
        return {"row": self.row, "label": self.label, **asdict(self.risk), **finite, **told}


@dataclass(frozen=True)
class Assessment:
    """All records under one model and one defense.

    Attributes:
        model: Spelling.
        defense: Spelling.
        records: In the order of their rows.
    """

    model: str
    defense: str
    records: tuple[RecordRisk, ...]

    @property
    def mean(self) -> float:
        """Mean InvRE."""
        return sum(record.risk.invre for record in self.records) / len(self.records)

    @property
    def mean_score(self) -> float:
        """Mean of Σ P_k τ_k, from which α is calibrated."""
        return sum(record.risk.score for record in self.records) / len(self.records)

    @property
    def worst(self) -> RecordRisk:
        """The record with the highest InvRE."""
        return max(self.records, key=lambda record: record.risk.invre)

    @property
    def ranked(self) -> tuple[RecordRisk, ...]:
        """Most exposed first; ties in the order of rows."""
        return tuple(sorted(self.records, key=lambda record: (-record.risk.invre, record.row)))

    @property
    def notes(self) -> tuple[str, ...]:
        """Every note once."""
        return tuple(dict.fromkeys(note for record in self.records for note in record.notes))

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        bands = [record.risk.band for record in self.records]
        return {
            "model": self.model,
            "defense": self.defense,
            "mean_invre": self.mean,
            "mean_score": self.mean_score,
            "worst_invre": self.worst.risk.invre,
            "bands": {name: bands.count(name) for name in ("minimal", "moderate", "high")},
            "most_exposed": [record.row for record in self.ranked[:5]],
            "least_exposed": [record.row for record in self.ranked[::-1][:5]],
            "seconds": round(sum(record.seconds for record in self.records), 3),
            "notes": list(self.notes),
            "records": [record.as_dict() for record in self.records],
        }


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
    check_records_are_separate(learner)
    directed = _directed(defense, learner)
    if directed:
        return _directed_release(directed, learner, record, target, defense, dtype)
    device = next(iter(learner.weights.values())).device
    batch = Batch(record.unsqueeze(0).to(device), target.unsqueeze(0).to(device))
    result = send(learner, batch, defense, seed)
    adversary = defense.adversary()
    observation = Observation(
        learners=(learner,),
        updates=(result.update,),
        payloads=(result.payload,),
        input_shape=tuple(record.shape),
        classes=_classes(learner, batch.inputs),
        examples=1,
        threat=ThreatModel(sees="embedding" if isinstance(learner, EmbeddingLearner) else "update"),
        adversary=adversary,
        labels=batch.targets,
    )
    data_noise = math.hypot(*(part.std for part in parts_of(defense) if isinstance(part, DataNoise)))
    known_noise = adversary.noise_std(observation)
    notes = _notes(defense, adversary.matches_plainly, adversary.incomplete_for(observation), data_noise, known_noise)
    if adversary.matches_plainly and not learner.noise:
        jacobian = gradient_jacobian(learner, record, target, dtype=dtype)
        return DefendedRelease(jacobian, data_noise, known_noise or 0.0, notes, plain=True)
    evidence = tensors.to(adversary.evidence(observation, 0), dtype)
    variables = tensors.to(adversary.variables(observation, seed.child("risk").generator("unknowns", device=device)), dtype)
    precise = learner.to(dtype)

    def share(x: Tensor) -> Named:
        simulated = adversary.replay(precise, x.unsqueeze(0), batch.targets, variables)
        return adversary.compare(evidence, simulated, variables).simulated

    return DefendedRelease(Jacobian(share, batch.inputs[0].to(dtype)), data_noise, known_noise or 0.0, notes)


def _directed(defense: Defense, learner: Learner) -> tuple[Directed, ...]:
    """Return the parts with noise along the record's own singular vectors, where nothing but Gaussian noise is added."""
    vertical = isinstance(learner, EmbeddingLearner)
    shared, even = (InvLENP, EmbeddingNoise) if vertical else (InvLGNP, GaussianNoise)
    acting = [part for part in parts_of(defense) if part.stations()]
    found = tuple(part for part in acting if isinstance(part, (InvLDNP, shared)))
    others = any(not isinstance(part, (InvLDNP, DataNoise, shared, even)) for part in acting)
    return () if others or learner.noise else found


def _directed_release(
    directed: tuple[Directed, ...], learner: Learner, record: Tensor, target: Tensor, defense: Defense, dtype: torch.dtype
) -> DefendedRelease:
    """Return the release without sending anything: whoever has one record takes that record's own singular vectors."""
    on_data = [part.std for part in parts_of(defense) if isinstance(part, DataNoise)]
    on_shared = [part.std for part in parts_of(defense) if isinstance(part, (GaussianNoise, EmbeddingNoise))]
    steps = learner.settings.steps(1) if learner.settings.shares == "weights" else 1
    public = any("public" in (getattr(part, "centres", ""), getattr(part, "basis", "")) for part in directed)
    found = []
    if steps > 1:
        found.append("the noise follows the gradient's singular vectors, taken here as those of the update of several steps")
    if public:
        found.append("the noise follows the singular vectors of public inputs, taken here as the record's own")
    jacobian = gradient_jacobian(learner, record, target, dtype=dtype)
    return DefendedRelease(jacobian, math.hypot(*on_data), math.hypot(*on_shared), tuple(found), plain=True, directed=directed)


def _notes(defense: Defense, plain: bool, incomplete: bool, data_noise: float, known_noise: float | None) -> tuple[str, ...]:
    found = []
    acting = [part for part in parts_of(defense) if part.stations()]
    unseen = plain and not data_noise and known_noise is None
    if acting and unseen:
        found.append(f"the score does not see what {spell_defense(defense)} does: no linear attacker of it is known")
    elif any(part.random for part in acting) and not data_noise and known_noise is None:
        found.append("the defense draws randomness of unknown law, which the score takes as known to the attacker")
    if incomplete:
        found.append("the attacker behind the score knows less than the whole defense")
    return tuple(found)


def assess(
    learner: Learner,
    batch: Batch,
    defense: Defense,
    *,
    alpha: float,
    beta: float = BETA,
    mode: str | Callable[[Jacobian], str] = "auto",
    gap_rule: str = "merge",
    noise_form: str = "paper",
    model: str = "",
    rows: Sequence[int] | None = None,
    seed: Seed | None = None,
    progress: Callable[[int], None] | None = None,
    known: MutableMapping[Hashable, Spectrum] | None = None,
) -> Assessment:
    """Return the risk of every record of a batch, each by itself.

    Args:
        learner: The client's training, with the model as the defense adapts it.
        batch: The records.
        defense: What protects them.
        alpha: Centre of the logistic; see `gradveil.risk.calibration`.
        beta: Its steepness.
        mode: auto, dense, gram or leading, or a function that chooses one for a Jacobian.
        gap_rule: merge, clamp or strict.
        noise_form: paper or inverse; see `gradveil.risk.invre.risk_score`.
        model: Spelling, for the record.
        rows: Rows of the records in their data set.
        seed: Root of all randomness.
        progress: Called with the number of finished records.
        known: Spectra of this learner's undefended updates, by row: read where one is there, filled where not. Defenses that
            only add noise leave the Jacobian as it is, so one decomposition serves all of them.
    """
    seed = seed or Seed(0)
    found = []
    for index in range(len(batch)):
        own = seed.child("risk", index)
        release = defended_release(learner, batch.inputs[index], batch.targets[index], defense, own)
        chosen = mode(release.jacobian) if callable(mode) else choose_mode(release.jacobian) if mode == "auto" else mode
        if chosen == "leading":
            # Single precision suffices: what Lanczos needs of a product is far below the error of the extrapolated tail.
            release = defended_release(learner, batch.inputs[index], batch.targets[index], defense, own, dtype=torch.float32)
        row = index if rows is None else rows[index]
        measured = known.get((row, chosen)) if known is not None and release.plain else None
        if measured is None:
            measured = spectrum(release.jacobian, mode=chosen, seed=own)
            if known is not None and release.plain:
                known[row, chosen] = measured
        score = risk_score(
            measured,
            alpha=alpha,
            beta=beta,
            gap_rule=gap_rule,
            data_noise=release.noise_on("data", measured),
            shared_noise=release.noise_on("shared", measured),
            noise_form=noise_form,
        )
        found.append(_record(row, batch.targets[index], release, measured, score))
        if progress is not None:
            progress(index + 1)
    return Assessment(model, spell_defense(defense), tuple(found))


def _record(row: int, target: Tensor, release: DefendedRelease, measured: Spectrum, score: RiskScore) -> RecordRisk:
    flat = "the input is black: its energy is zero, so the score says nothing about it"
    return RecordRisk(
        row=row,
        label=int(target) if target.ndim == 0 else None,
        risk=score,
        fisher=fisher_leakage(measured, release.shared_noise),
        diagonal=diagonal_leakage(measured, release.shared_noise),
        mode=measured.mode,
        seconds=measured.seconds,
        notes=(*release.notes, *measured.notes, *([flat] if measured.energy == 0 else [])),
    )


def _classes(learner: Learner, inputs: Tensor) -> int:
    with torch.no_grad():
        outputs = learner.forward(learner.weights, inputs, learner.zero_noise(len(inputs)))
    outputs = outputs[0] if isinstance(outputs, tuple) else outputs
    return int(outputs.shape[1]) if outputs.ndim == 2 else 0
