"""Named, versioned ensembles: what a defense is judged by.

They take no parameters, so two people who name the same one ran the same attackers. A published version never changes; a better
ensemble gets a new number. The short names ``quick`` and ``standard`` mean the newest version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gradveil.attacks.adaptive import FIRST_STANCES, STANCES, stances_for
from gradveil.attacks.base import ATTACKS, Attack, AttackContext, check_is_attack
from gradveil.attacks.batch_statistics import with_statistics
from gradveil.attacks.deep_leakage import DLG, IDLG
from gradveil.attacks.feature_inversion import FeatureInversion
from gradveil.attacks.generic.rounds import by_round
from gradveil.attacks.gradient_matching import GradientMatching
from gradveil.attacks.inverting_gradients import InvertingGradients
from gradveil.attacks.kernel_regression import KernelRegression
from gradveil.attacks.linear_layer import LinearLayer
from gradveil.attacks.linear_map import LinearMap
from gradveil.attacks.peeling import Peeling
from gradveil.attacks.piste import PisteLike
from gradveil.attacks.wiener import Wiener
from gradveil.errors import UsageError, suggest
from gradveil.records import Observation, Reconstruction

__all__ = ["ENSEMBLES", "Ensemble", "Member", "informed_twins", "line_up", "names", "resolve"]


@dataclass(frozen=True)
class Member:
    """An attack and the stances it takes towards the defense.

    Attributes:
        attack: With its settings.
        stances: Of which it takes those that make sense for what was seen.
        where_equal: Whether it is for updates only whose tensors should weigh alike, as the defense's attacker says.
    """

    attack: Any
    stances: tuple[str, ...] = ("plain",)
    where_equal: bool = False


@dataclass(frozen=True)
class Ensemble:
    """A frozen set of attackers.

    Attributes:
        name: With its version, as reports print it.
        summary: One sentence.
        members: Attacks with their stances.
        rehearsals: Public images the attacker tries everything on before.
        by_round: Whether several rounds are also attacked one by one and put together (`gradveil.attacks.generic.rounds`).
    """

    name: str
    summary: str
    members: tuple[Member, ...]
    rehearsals: int
    by_round: bool = False


def _smooth_to_sharp(steps: int, restarts: int = 1, **changes: Any) -> InvertingGradients:
    """Cosine matching that starts grey and smooth and lets go of smoothness; prior weights in units of the starting loss."""
    settings: dict[str, Any] = {
        "steps": steps,
        "restarts": restarts,
        "signed": False,
        "schedule": "cosine",
        "tv": 0.25,
        "tv_end": 2.5e-5,
        "relative": True,
        "start": "grey",
        "smooth_relu": True,
        "title": "smooth_to_sharp",
    }
    return InvertingGradients(**(settings | changes))


def _stay_smooth(steps: int, **changes: Any) -> InvertingGradients:
    """The same with a stronger prior that is never let go: for updates that determine the input only in part."""
    settings: dict[str, Any] = {"learning_rate": 0.05, "tv": 0.5, "tv_end": 0.02, "title": "stay_smooth"}
    return _smooth_to_sharp(steps, **(settings | changes))


def _likelihood(steps: int, tv: float) -> InvertingGradients:
    """Maximum a posteriori under the known noise: Gaussian log-likelihood plus a Laplace prior on differences of neighbours."""
    return _smooth_to_sharp(
        steps, objective="likelihood", tv=tv, tv_end=None, relative=False, stance="informed", title=f"noise_likelihood_{tv:g}"
    )


QUICK = Ensemble(
    "quick-1",
    "A first look in minutes: a sharp and a smooth recipe, the likelihood where noise is known, and two cheap analytic attacks.",
    (
        Member(_smooth_to_sharp(400), ("plain", "informed")),
        Member(_stay_smooth(250), FIRST_STANCES),
        Member(_likelihood(300, 1.0), ("informed",)),
        Member(FeatureInversion(steps=300)),
        Member(LinearLayer()),
    ),
    rehearsals=2,
)

STANDARD = Ensemble(
    "standard-1",
    "The judgement we publish: complementary recipes with restarts, every stance, and published attacks in their own settings.",
    (
        Member(_smooth_to_sharp(2000, 2), FIRST_STANCES),
        Member(_stay_smooth(1500, restarts=2), FIRST_STANCES),
        Member(_stay_smooth(1500, tv=0.25, tv_end=0.0025, title="smooth_to_fine"), ("plain", "informed")),
        Member(_stay_smooth(1500, tv=3.0, tv_end=0.1, title="stay_smoother"), ("plain", "informed")),
        Member(
            _smooth_to_sharp(1500, objective="layer_cosine", title="smooth_to_sharp_layers"), ("plain", "informed", "zero_mask")
        ),
        Member(_likelihood(1500, 1.0), ("informed",)),
        Member(_likelihood(1500, 10.0), ("informed",)),
        Member(InvertingGradients(steps=2000)),
        Member(IDLG(steps=400), ("plain", "informed")),
        Member(DLG(steps=400)),
        Member(FeatureInversion(steps=1500)),
        Member(LinearLayer()),
    ),
    rehearsals=4,
)

# Peeling applies only to networks with max pooling, where the others fail; everywhere else these are the versions before.
QUICK_2 = replace(
    QUICK,
    name="quick-2",
    summary=QUICK.summary.removesuffix(".") + "; peeling where the network has max pooling.",
    members=(*QUICK.members, Member(Peeling(steps=1200))),
)

STANDARD_2 = replace(
    STANDARD,
    name="standard-2",
    summary=STANDARD.summary.removesuffix(".") + "; peeling where the network has max pooling.",
    members=(*STANDARD.members, Member(Peeling(steps=2400, restarts=2))),
)


def _smooth_layers(steps: int) -> InvertingGradients:
    """Every tensor alike, a smooth start, and smoothness let go only in part: for what SVDefense leaves of a wide network."""
    return _smooth_to_sharp(steps, objective="relative_l2", tv_end=2.5e-3, title="smooth_layers")


# On other networks and under other defenses these, too, are the versions before.
QUICK_3, STANDARD_3 = (
    replace(
        before,
        name=name,
        summary=before.summary.removesuffix(".") + "; a search that weighs tensors alike where loud ones drown the rest.",
        members=(*before.members, Member(_smooth_layers(steps), ("informed",), where_equal=True)),
    )
    for before, name, steps in ((QUICK_2, "quick-3", 400), (STANDARD_2, "standard-3", 1000))
)


def _in_every_stance(before: Ensemble, name: str, summary: str) -> Ensemble:
    """The same where the searches that took every stance there was take those too that are learned from the client's code."""
    members = tuple(replace(m, stances=STANCES) if m.stances == FIRST_STANCES else m for m in before.members)
    return replace(before, name=name, summary=summary, members=members, by_round=True)


# What is learned from the client's code runs only where that pays, so under defenses that need an author to be understood, and in
# one round, these are the versions before.
MORE = "magnitudes, robust and learned comparisons where they tell inputs apart; rounds also one by one."
QUICK_4 = _in_every_stance(QUICK_3, "quick-4", f"{QUICK_3.summary.removesuffix('.')}; {MORE}")
STANDARD_4 = _in_every_stance(STANDARD_3, "standard-4", f"{STANDARD_3.summary.removesuffix('.')}; {MORE}")


def _patient(member: Member) -> Member:
    """The member with four times its steps, twice its starts, and every stance it has a use for."""
    attack = member.attack
    changes = {name: factor * getattr(attack, name) for name, factor in (("steps", 4), ("restarts", 2)) if hasattr(attack, name)}
    # Who took plain and informed can take every stance; who took one of them was made for that one.
    stances = STANCES if {"plain", "informed"} <= set(member.stances) and isinstance(attack, GradientMatching) else member.stances
    return replace(member, attack=replace(attack, **changes), stances=stances)


# Meant for a GPU, where thousands of candidates cost little more than a few.
STRONG = replace(
    STANDARD_4,
    name="strong-1",
    summary="Patience: the attackers of standard-4 with four times the steps, twice the starts and every stance; for a GPU.",
    members=tuple(_patient(member) for member in STANDARD_4.members),
    rehearsals=8,
)


def _with_priors(before: Ensemble, name: str, regression: KernelRegression, *linear: Member) -> Ensemble:
    """The same and who learns from public records: a regression that no author can switch off, and textbook linear priors."""
    summary = f"{before.summary.removesuffix('.')}; a regression on public records, and linear priors learned from them."
    return replace(before, name=name, summary=summary, members=(*before.members, Member(regression, regression.stances), *linear))


ONE_STEP, BY_SEARCH = (Member(attack, ("plain", "informed", "learned")) for attack in (Wiener(), LinearMap()))
PATIENT_SEARCH = Member(LinearMap(steps=1600), ("plain", "informed", "averaged", "learned"))
PATIENT_REGRESSION = KernelRegression(records=1600, draws=4, seconds=120.0)
QUICK_5 = _with_priors(QUICK_4, "quick-5", KernelRegression(records=200), Member(Wiener(), ("plain", "informed")))
STANDARD_5 = _with_priors(STANDARD_4, "standard-5", KernelRegression(records=400), ONE_STEP, BY_SEARCH)
STRONG_2 = _with_priors(STRONG, "strong-2", PATIENT_REGRESSION, ONE_STEP, PATIENT_SEARCH)


def _embedding_sharp(steps: int, **changes: Any) -> InvertingGradients:
    """Squared error on the embedding from a smooth start: an embedding tells scale too, which a cosine would throw away."""
    return _smooth_to_sharp(steps, **({"objective": "l2", "title": "embedding_sharp"} | changes))


def _embedding_smooth(steps: int, **changes: Any) -> InvertingGradients:
    """The same with a strong prior that is kept, for embeddings smaller than the input."""
    settings: dict[str, Any] = {"objective": "l2", "tv": 3.0, "tv_end": 0.1, "smooth_relu": False, "title": "embedding_smooth"}
    return _stay_smooth(steps, **(settings | changes))


EMBEDDING_QUICK = Ensemble(
    "embedding-quick-1",
    "What `quick` means where an embedding is seen: a sharp and a smooth recipe on squared error, and an untrained decoder.",
    (
        Member(_embedding_sharp(300), ("plain", "informed")),
        Member(_embedding_smooth(300), FIRST_STANCES),
        Member(_likelihood(300, 1.0), ("informed",)),
        Member(PisteLike(steps=250), ("plain", "informed")),
    ),
    rehearsals=2,
)

EMBEDDING_STANDARD = Ensemble(
    "embedding-standard-1",
    "What `standard` means where an embedding is seen: more steps and restarts, every stance, and DLG and IG as published.",
    (
        Member(_embedding_sharp(1500, restarts=2), FIRST_STANCES),
        Member(_embedding_sharp(1500, smooth_relu=False, title="embedding_sharp_relu"), ("plain", "informed")),
        Member(_embedding_smooth(1500), FIRST_STANCES),
        Member(_smooth_to_sharp(1500), ("plain", "informed", "zero_mask")),
        Member(_likelihood(1500, 1.0), ("informed",)),
        Member(_likelihood(1500, 10.0), ("informed",)),
        Member(InvertingGradients(steps=2000)),
        Member(IDLG(steps=500), ("plain", "informed")),
        Member(PisteLike(), ("plain", "informed")),
    ),
    rehearsals=4,
)

# The same attackers; from this version on a judgement comes with power and canaries (`gradveil.run.power`).
EMBEDDING_STANDARD_2 = replace(EMBEDDING_STANDARD, name="embedding-standard-2")

EMBEDDING_STRONG = replace(
    EMBEDDING_STANDARD_2,
    name="embedding-strong-1",
    summary="What `strong` means where an embedding is seen: four times the steps, twice the starts and every stance; for a GPU.",
    members=tuple(_patient(member) for member in EMBEDDING_STANDARD_2.members),
    rehearsals=8,
    by_round=True,
)

# The rest stand for one question of one published table each, and are no judgement of a defense.

# For large networks, where an ensemble costs minutes a row: the published recipe in its own settings, by someone who ignores the
# defense, by someone who knows it and by someone who reads masks off the zeros; feature inversion costs next to nothing.
PUBLISHED_RECIPE = Ensemble(
    "published-recipe-1",
    "Inverting gradients as published, 1,000 steps, plain, informed and with a mask; feature inversion.",
    (Member(InvertingGradients(steps=1000), ("plain", "informed", "zero_mask")), Member(FeatureInversion(steps=300))),
    rehearsals=1,
)

# What the published recipe lacks where only the loudest direction of each layer arrives: under one cosine that direction, which
# hardly differs between pictures, drowns the quiet exact tensors, and one small weight of total variation leaves the rest noise.
# Here it stands alone beside the cheap attack it has to beat; with no rehearsal the better fit is chosen.
SMOOTH_LAYERS = Ensemble(
    "smooth-layers-1",
    "The smooth recipe that weighs all tensors alike, informed; feature inversion.",
    (Member(_smooth_layers(1000), ("informed",)), Member(FeatureInversion(steps=300))),
    rehearsals=0,
)

# Several rounds multiply the cost, and only those who know the tilt of the hardened SVDefense can use them: the two recipes of
# `quick` as such attackers.
INFORMED = Ensemble(
    "informed-1",
    "The two matching recipes of quick-1, informed; no rehearsal.",
    tuple(Member(member.attack, ("informed",)) for member in QUICK.members[:2]),
    rehearsals=0,
)

# What arrives exactly, or nearly so, says its last words late: the four smooth recipes of `standard`, informed, at full length.
PATIENT = Ensemble(
    "patient-1",
    "The four smooth recipes of standard-1, informed, one start each; no rehearsal.",
    tuple(Member(replace(member.attack, restarts=1), ("informed",)) for member in STANDARD.members[:4]),
    rehearsals=0,
)

# For defenses that are dear to run, such as Refiner and guided noise: running them on every candidate would cost minutes to hours
# a record on a processor. Tables made with these are plain against informed, and say so.
QUICK_NO_SIMULATION, EMBEDDING_QUICK_NO_SIMULATION = (
    Ensemble(
        name,
        f"{whole.name} without the attackers that run the defense's own code on their candidates.",
        tuple(Member(m.attack, tuple(s for s in m.stances if s not in ("straight_through", "averaged"))) for m in whole.members),
        rehearsals=whole.rehearsals,
    )
    for name, whole in (("quick-no-simulation-1", QUICK), ("embedding-quick-no-simulation-1", EMBEDDING_QUICK))
)

ENSEMBLES = {
    ensemble.name: ensemble
    for ensemble in (
        *(QUICK, QUICK_2, QUICK_3, QUICK_4, QUICK_5),
        *(STANDARD, STANDARD_2, STANDARD_3, STANDARD_4, STANDARD_5, STRONG, STRONG_2),
        *(EMBEDDING_QUICK, EMBEDDING_STANDARD, EMBEDDING_STANDARD_2, EMBEDDING_STRONG),
        *(PUBLISHED_RECIPE, SMOOTH_LAYERS, INFORMED, PATIENT, QUICK_NO_SIMULATION, EMBEDDING_QUICK_NO_SIMULATION),
    )
}


def names() -> list[str]:
    """Return the versioned names."""
    return sorted(ENSEMBLES)


def resolve(spelling: str, sees: str = "update") -> Ensemble:
    """Return an ensemble by name (``quick`` means its newest version), or one attack in all its stances as an ensemble of one.

    Args:
        spelling: Name, versioned or short, or an attack.
        sees: What the attacker sees, as in `gradveil.records.ThreatModel`; of embeddings, short names mean the ensembles made
            for them.
    """
    made_for_embeddings = f"embedding-{spelling}"
    if sees != "update" and any(name.rpartition("-")[0] == made_for_embeddings for name in ENSEMBLES):
        spelling = made_for_embeddings
    versions = [name for name in ENSEMBLES if name == spelling or name.rpartition("-")[0] == spelling]
    if versions:
        return ENSEMBLES[max(versions, key=lambda name: int(name.rpartition("-")[2]))]
    bare = spelling.partition("(")[0].strip()
    known = [*ENSEMBLES, *ATTACKS.names()]
    if ":" not in bare and bare not in ATTACKS.names():
        raise UsageError(f"there is no ensemble or attack called {bare!r}{suggest(bare, known)}")
    attack = ATTACKS.build(spelling)
    check_is_attack(attack)
    return Ensemble(spelling, "One attack in every stance it can take.", (Member(attack, attack.stances),), rehearsals=2)


def line_up(ensemble: Ensemble, observation: Observation, context: AttackContext) -> list[Attack]:
    """Return the attacks to launch: every member that applies, in every stance that makes sense for what was seen.

    Where the threat model grants BatchNorm statistics and the upload carries them, matching recipes run with them as well.
    """
    asked = {stance for member in ensemble.members for stance in member.stances}
    possible, told = stances_for(observation, context, asked), observation.adversary.arrives(observation)
    attacks: list[Attack] = []
    for member in ensemble.members:
        if member.attack.applies(observation) is not None:
            continue
        if member.where_equal and not told.equal_weights:
            continue
        stances = [stance for stance in member.stances if stance in possible and stance in member.attack.stances]
        if told.plain_search and "plain" in member.attack.stances:
            # The informed search would be the plain one step by step; what the defense's attacker adds comes with
            # `informed_twins`.
            stances = [stance for stance in stances if stance != "informed"]
        here = [member.attack.with_stance(stance) for stance in stances]
        here = [attack for attack in here if attack.lacks(observation, context) is None]
        more: list[Attack | None] = [
            with_statistics(attack, observation) for attack in here if attack.stance in ("plain", "informed")
        ]
        if ensemble.by_round:
            more += [by_round(attack, observation, fresh=context.random_defense) for attack in here]
        attacks += [*here, *(attack for attack in more if attack is not None)]
    return attacks


def informed_twins(found: list[Reconstruction], observations: Sequence[Observation]) -> list[Reconstruction]:
    """Return, for a defense whose attacker searches as the plain one does, plain candidates with that attacker's last touch."""
    twins = []
    plain = [observation.adversary.arrives(observation).plain_search for observation in observations]
    for candidate in found:
        if candidate.stance != "plain" or not plain[candidate.target]:
            continue
        observation = observations[candidate.target]
        finished = observation.adversary.finish(candidate.replace(stance="informed"), observation)
        if not torch.equal(finished.inputs, candidate.inputs):
            twins.append(finished.replace(inputs=finished.inputs.clamp(0, 1), unfinished=candidate.inputs))
    return twins
