"""The contract of an attack: a frozen dataclass that derives from `Attack` and writes ``run``, behind the sealed call `launch`.

An attack sees `Observation` records and an `AttackContext`. It never sees true inputs, and this package never imports data,
defenses or federation: what the attacker can do with the defense's own code comes through ``context.simulate``, on inputs of the
attacker's own making.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from gradveil.errors import MissingKnowledge, UsageError
from gradveil.randomness import Seed
from gradveil.records import Knowledge, Observation, Reconstruction
from gradveil.registry import Card, Registry
from gradveil.tensors import Named, check_finite

__all__ = [
    "ATTACKS",
    "Attack",
    "AttackCard",
    "AttackContext",
    "Cost",
    "Observe",
    "PublicRecords",
    "Simulate",
    "SimulateMany",
    "check_is_attack",
    "launch",
]

USES_THE_DEFENSE = ("informed", "straight_through", "averaged", "magnitudes", "robust", "learned", "simulated")

Simulate = Callable[[Tensor, Tensor, int], tuple[Named, ...]]
"""``(inputs, targets, draw) -> update of each round``: the client's whole defended code on the attacker's own data."""

SimulateMany = Callable[[Tensor, Tensor, int], tuple[Named, ...]]
"""The same for many candidates at once, along a leading axis of everything; all with the randomness of one draw."""

Observe = Callable[[Tensor, Tensor, int], Observation]
"""``(inputs, targets, draw) -> observation``: what the attacker would have seen had the client held the attacker's own data."""


@dataclass(frozen=True, kw_only=True)
class AttackCard(Card):
    """A card with what an attack needs and where it is at home.

    Attributes:
        needs: Knowledge it asks for.
        home: The setting in which it must reach ``floor_psnr``, in words.
        floor_psnr: Median PSNR in dB it must reach there; the contract suite checks it.
    """

    needs: frozenset[Knowledge] = frozenset()
    home: str = ""
    floor_psnr: float = 0.0


@dataclass(frozen=True)
class PublicRecords:
    """Records that an attacker holds beside the update and learns from; none of them, nor a near copy, is under attack.

    Attributes:
        inputs: (P, ...) in [0, 1].
        targets: (P,) their labels.
        source: Where they come from: ``same`` (the data under attack), ``other`` (other data), ``none`` (drawn from a law).
    """

    inputs: Tensor
    targets: Tensor
    source: str


@dataclass(frozen=True)
class AttackContext:
    """What an attacker works with.

    Attributes:
        seed: Root of all randomness of the attack.
        budget: Most optimisation steps one recipe may spend.
        execution: ``auto``, ``batched``, ``looped``, ``captured`` or ``compiled``.
        simulate: The client's defended code on the attacker's own data, where the defense is known.
        simulate_many: The same for many candidates at once; it may fail or err, so ask `engine.client_runs` instead.
        progress: Called with the number of candidate-steps done since the last call.
        random_defense: Whether the known defense draws randomness.
        own: Inputs (P, B, ...) and targets (P, B) of the attacker's own, each what one observation comes from, to find out what
            the client's code does.
        watch: Called after every step of a gradient-matching recipe with the number of steps and the best leaves so far, one row
            per target and restart; for studies of how attacks converge.
        observe: The same as all that would be seen, payloads included; also where nothing is done to the update.
        memory: What attackers have learned of this client and may share, by what it depends on.
        public: Records to learn from, where the attacker has any.
    """

    seed: Seed
    budget: int = 1000
    execution: str = "auto"
    simulate: Simulate | None = None
    simulate_many: SimulateMany | None = None
    progress: Callable[[int], None] | None = None
    random_defense: bool = False
    own: tuple[Tensor, Tensor] | None = None
    watch: Callable[[int, Named], None] | None = None
    observe: Observe | None = None
    memory: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)
    public: PublicRecords | None = None

    def steps(self, wanted: int) -> int:
        """Return how many of the wanted steps the budget allows."""
        return max(1, min(wanted, self.budget))


@dataclass(frozen=True)
class Cost:
    """What an attack spends on one target at most; what is planned, shown as progress and estimated follows from it.

    Attributes:
        steps: Evaluations per restart.
        restarts: Candidates per target, for each of its plausible labels.
        client_updates: Updates of the defended client per step, in the mean, where it is run along the way.
        per_label: Whether all updates of one label share what is spent, so that as many are paid for as there are labels.
    """

    steps: int = 1
    restarts: int = 1
    client_updates: float = 0.0
    per_label: bool = False


@dataclass(frozen=True)
class Attack:
    """Base of all attacks: a frozen dataclass that derives from it writes ``run``, and overrides what is not as here."""

    card: ClassVar[AttackCard]

    def run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        """Return candidates, each naming its observation by index; called through `launch` only."""
        raise UsageError(f"{type(self).__name__} does not say how to attack; write its method run(observations, context)")

    def applies(self, observation: Observation) -> str | None:
        """Return None where the attack can be tried, else one sentence why it cannot."""
        return None

    def lacks(self, observation: Observation, context: AttackContext) -> str | None:
        """Return None where the attacker has what the attack works with, else one sentence on what is missing."""
        return None

    @property
    def stance(self) -> str:
        """How the attack treats the defense; a settable one is a field of the dataclass."""
        return "plain"

    @property
    def stances(self) -> tuple[str, ...]:
        """The stances it can take; who does the same in every stance has one."""
        return ("plain",)

    def with_stance(self, stance: str) -> Self:
        """Return the attack in another of its stances."""
        if stance not in self.stances:
            raise UsageError(f"attack {self.card.name!r} has no stance {stance!r}; it takes {', '.join(self.stances)}")
        if stance == self.stance:
            return self
        changes: dict[str, Any] = {"stance": stance}
        return dataclasses.replace(self, **changes)

    def cost(self) -> Cost:
        """Return what it spends on one target at most; one look at the update unless it says otherwise."""
        return Cost()

    def hypotheses(self, observation: Observation, context: AttackContext) -> int:
        """Return with how many different labels it searches for this target; what it costs is per label."""
        return 1

    def needs(self, observation: Observation) -> frozenset[Knowledge]:
        """Return what it must know: what its card says, the defense if its stance uses it, and how local steps were taken."""
        needed = set(self.card.needs)
        if self.stance in USES_THE_DEFENSE:
            needed.add(Knowledge.DEFENSE)
        if observation.learner.settings.shares == "weights":
            needed.add(Knowledge.LEARNING_RATE)
        return frozenset(needed)


ATTACKS: Registry[type[Attack], AttackCard] = Registry("attack", "gradveil.attacks")


@dataclass
class _Guard:
    """Notices an attack that changes what it was only shown."""

    before: list[Tensor] = field(default_factory=list)

    @staticmethod
    def _tensors(observations: Sequence[Observation]) -> list[Tensor]:
        first = observations[0]
        shown = [value for learner in first.learners for value in (*learner.weights.values(), *learner.buffers.values())]
        return [*shown, *(v for o in observations for update in o.updates for v in update.weights.values())]

    def watch(self, observations: Sequence[Observation]) -> None:
        self.before = [value.sum(dtype=torch.float64) for value in self._tensors(observations)]

    def check(self, observations: Sequence[Observation], name: str) -> None:
        after = [value.sum(dtype=torch.float64) for value in self._tensors(observations)]
        if any(not torch.equal(a, b) for a, b in zip(self.before, after, strict=True)):
            raise UsageError(f"attack {name!r} changed the model or the update it was shown; it must work on copies")


def check_is_attack(attack: object) -> None:
    """Refuse what does not derive from `Attack`, with the sentence that tells how to mend it."""
    if not isinstance(attack, Attack):
        raise UsageError(
            f"{type(attack).__name__} is no attack: derive it from gradveil.attacks.Attack, which fills in all but `run`"
        )


def launch(attack: Attack, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
    """Run an attack: check what it asks for, guard what it is shown, and return finite candidates inside [0, 1].

    Raises:
        MissingKnowledge: The threat model does not grant what the attack needs.
        UsageError: It is no attack, or does not apply to this observation.
        BadUpdate: An update has entries that are not finite.
    """
    check_is_attack(attack)
    if not observations:
        return []
    card = attack.card
    missing = attack.needs(observations[0]) - observations[0].threat.knows
    if missing:
        withheld = " and ".join(str(item) for item in Knowledge if item in missing)
        raise MissingKnowledge(f"attack {card.name!r} needs to know {withheld}; grant it in the threat model or drop the attack")
    for update in (update for observation in observations for update in observation.updates):
        check_finite(update.weights, "the update under attack")
    reason = attack.applies(observations[0]) or attack.lacks(observations[0], context)
    if reason:
        raise UsageError(f"attack {card.name!r} does not apply: {reason}")
    guard = _Guard()
    guard.watch(observations)
    candidates = attack.run(observations, context)
    guard.check(observations, card.name)
    _check_answers(candidates, len(observations), card.name)
    return [_presentable(candidate, observations[candidate.target]) for candidate in candidates]


def _check_answers(candidates: object, count: int, name: str) -> None:
    """Refuse answers that leave an observation out: whoever answers for some alone could choose the easy ones."""
    if not isinstance(candidates, (list, tuple)) or not all(isinstance(each, Reconstruction) for each in candidates):
        raise UsageError(f"attack {name!r} returned {type(candidates).__name__}; `run` returns a list of Reconstruction")
    lost = next((each.target for each in candidates if not 0 <= each.target < count), None)
    if lost is not None:
        raise UsageError(f"attack {name!r} answered for observation {lost} of {count}; `target` counts them from 0")
    answered: dict[tuple[str, str], set[int]] = {("", ""): set()} if not candidates else {}
    for each in candidates:
        answered.setdefault((each.recipe, each.stance), set()).add(each.target)
    fewest = min(len(own) for own in answered.values())
    if fewest < count:
        raise UsageError(
            f"attack {name!r} answered for {fewest} of {count} observations; every recipe returns a candidate for each of them, "
            "however poor"
        )


def _presentable(candidate: Reconstruction, observation: Observation) -> Reconstruction:
    expected = (observation.examples, *observation.input_shape)
    if tuple(candidate.inputs.shape) != expected:
        raise UsageError(
            f"attack recipe {candidate.recipe!r} returned shape {tuple(candidate.inputs.shape)}, expected {expected}"
        )
    if len(candidate.targets) != observation.examples:
        raise UsageError(
            f"attack recipe {candidate.recipe!r} returned {len(candidate.targets)} labels, expected {observation.examples}"
        )
    found = candidate.inputs.detach()
    inputs = torch.nan_to_num(found, nan=0.5, posinf=1.0, neginf=0.0).clamp(0, 1).contiguous()
    candidate = candidate.replace(inputs=inputs, status=candidate.status if bool(found.isfinite().all()) else "not finite")
    if candidate.stance != "informed" or candidate.unfinished is not None:
        return candidate
    finished = observation.adversary.finish(candidate, observation)
    return finished.replace(inputs=finished.inputs.clamp(0, 1).contiguous(), unfinished=inputs)
