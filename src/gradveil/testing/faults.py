"""Defenses that are wrong on purpose. The contract suite must reject each by the named check, or it has gone blind.

Several are taken from released code: a clip that edits in place and forgets scalars, a defense that returns its input, an
attacker whose matching is detached or has the wrong sign. None of them is registered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradveil.adversary import OpenAdversary
from gradveil.defenses.base import ClientView, Defense, DefenseCard, Need, State
from gradveil.defenses.clipping import ClippedUpdateAdversary, Clipping
from gradveil.defenses.data_noise import DataNoise
from gradveil.defenses.entry_dropout import EntryDropout
from gradveil.defenses.gaussian_noise import GaussianNoise, NoisyUpdateAdversary
from gradveil.defenses.pruning import Pruning
from gradveil.defenses.soteria import Soteria
from gradveil.learning.learner import Learner
from gradveil.records import Batch, Comparison, ModelSpec, Observation, Payload, Update, WhatArrives
from gradveil.tensors import Named, norm, scale

__all__ = ["FAULTS"]

FAULTS: list[tuple[type[Defense], str]] = []
"""Every wrong defense, with the name of a check that must reject it."""


def rejected_by(*checks: str) -> Callable[[type[Defense]], type[Defense]]:
    """File a wrong defense under the checks that must reject it."""

    def file(kind: type[Defense]) -> type[Defense]:
        FAULTS.extend((kind, check) for check in checks)
        return kind

    return file


def _card(like: type[Defense], **changes: Any) -> DefenseCard:
    return dataclasses.replace(like.card, name="wrong", **changes)


@rejected_by("inputs_are_untouched", "scalar_is_one_entry")
@dataclass(frozen=True, kw_only=True)
class ClipsInPlace(Clipping):
    """Flower's clipping helper: items are edited in place, so a scalar, which is a copy there, stays as it is.

    Departs from the paper, Cost, Known weakness: wrong on purpose.
    """

    card: ClassVar[DefenseCard] = _card(Clipping)

    def protect_update(self, update: Update, view: ClientView, state: State) -> tuple[Update, State]:
        """Clip the tensors that have axes, where they are."""
        length = norm(update.weights)
        if self.bound is not None and length > self.bound:
            for value in update.weights.values():
                if value.ndim:
                    value.mul_(self.bound / length)
        return update, state


@rejected_by("odd_updates_survive")
@dataclass(frozen=True, kw_only=True)
class DividesByZero(Clipping):
    """Divides by the norm without looking: a zero update becomes NaN.

    Departs from the paper, Cost, Known weakness: wrong on purpose.
    """

    card: ClassVar[DefenseCard] = _card(Clipping)

    def protect_update(self, update: Update, view: ClientView, state: State) -> tuple[Update, State]:
        """Scale by min(1, bound / norm), with 0 / 0 inside."""
        length = norm(update.weights)
        unit = scale(update.weights, 1 / length)
        return update.replace(weights=scale(unit, length if self.bound is None else length.clamp(max=self.bound))), state


@rejected_by("global_generators_are_untouched", "randomness_is_declared")
@dataclass(frozen=True, kw_only=True)
class NoiseFromTheGlobalGenerator(GaussianNoise):
    """Draws from torch's global generator, so a seed means nothing.

    Departs from the paper, Cost, Known weakness: wrong on purpose.
    """

    card: ClassVar[DefenseCard] = _card(GaussianNoise)

    def protect_update(self, update: Update, view: ClientView, state: State) -> tuple[Update, State]:
        """Add noise of unknown origin."""

        def noisy(value: Tensor) -> Tensor:
            return value + self.std * torch.randn(value.shape, generator=torch.default_generator, dtype=value.dtype)

        return update.replace(weights={name: noisy(value) for name, value in update.weights.items()}), state


@rejected_by("randomness_is_declared")
@dataclass(frozen=True, kw_only=True)
class SaysNothingOfChance(GaussianNoise):
    """Is random, and its card does not say so.

    Departs from the paper, Cost, Known weakness: wrong on purpose.
    """

    card: ClassVar[DefenseCard] = _card(GaussianNoise, random=False)


@rejected_by("randomness_is_declared")
@dataclass(frozen=True, kw_only=True)
class FixedSeed(GaussianNoise):
    """Draws the same noise whatever the seed, as released code does with a seed in its configuration; anyone can subtract it.

    Departs from the paper, Cost, Known weakness: wrong on purpose.
    """

    card: ClassVar[DefenseCard] = _card(GaussianNoise)

    def protect_update(self, update: Update, view: ClientView, state: State) -> tuple[Update, State]:
        """Add noise that everyone knows."""
        generator = torch.Generator().manual_seed(0)
        drawn = {n: torch.randn(v.shape, generator=generator, dtype=v.dtype) for n, v in update.weights.items()}
        return update.replace(weights={n: v + self.std * drawn[n] for n, v in update.weights.items()}), state


@rejected_by("keeps_no_memory")
@dataclass(frozen=True, kw_only=True)
class RemembersOnTheObject(Pruning):
    """Error feedback kept on the object instead of in the state: a resumed run differs, and clients share their secrets.

    Departs from the paper, Cost, Known weakness: wrong on purpose.
    """

    card: ClassVar[DefenseCard] = _card(Pruning)
    left_over: dict[str, Tensor] = field(default_factory=dict, init=False, compare=False, repr=False, hash=False)

    def protect_update(self, update: Update, view: ClientView, state: State) -> tuple[Update, State]:
        """Add what was pruned the last time, prune, and keep the rest."""
        given = {
            name: value + self.left_over.get(name, torch.zeros(())).to(value) if self._fits(name, value) else value
            for name, value in update.weights.items()
        }
        sent, state = super().protect_update(update.replace(weights=given), view, state)
        self.left_over.update({name: value - sent.weights[name] for name, value in given.items()})
        return sent, state

    def _fits(self, name: str, value: Tensor) -> bool:
        return name in self.left_over and self.left_over[name].shape == value.shape


@rejected_by("more_strength_distorts_more")
@dataclass(frozen=True, kw_only=True)
class DoesNothing(GaussianNoise):
    """Outpost as released since commit 9f0af629: computes a protected update and returns the raw one.

    Departs from the paper, Cost, Known weakness: wrong on purpose.
    """

    card: ClassVar[DefenseCard] = _card(GaussianNoise, random=False)

    def protect_update(self, update: Update, view: ClientView, state: State) -> tuple[Update, State]:
        """Throw the result away."""
        super().protect_update(update, view, state)
        return update, state

    def adversary(self) -> OpenAdversary:
        """Return the attacker who knows that nothing is done."""
        return OpenAdversary()


@rejected_by("off_is_the_identity")
@dataclass(frozen=True, kw_only=True)
class NeverOff(EntryDropout):
    """Zeroes an entry even where it is switched off.

    Departs from the paper, Cost, Known weakness: wrong on purpose.
    """

    card: ClassVar[DefenseCard] = _card(EntryDropout)

    def protect_update(self, update: Update, view: ClientView, state: State) -> tuple[Update, State]:
        """Drop, then halve what is left."""
        update, state = super().protect_update(update, view, state)
        return update.replace(weights=scale(update.weights, 0.5)), state


@rejected_by("more_strength_distorts_more")
@dataclass(frozen=True, kw_only=True)
class LadderUpsideDown(Pruning):
    """Lists its settings from strong to weak.

    Departs from the paper, Cost, Known weakness: wrong on purpose.
    """

    card: ClassVar[DefenseCard] = _card(Pruning, ladder=tuple(reversed(Pruning.card.ladder)))


@rejected_by("not_finite_is_refused")
@dataclass(frozen=True, kw_only=True)
class HidesNotFinite(Pruning):
    """Replaces a NaN by zero and an infinity by a large number, so that a broken training goes on unnoticed.

    Departs from the paper, Cost, Known weakness: wrong on purpose.
    """

    card: ClassVar[DefenseCard] = _card(Pruning)

    def protect_update(self, update: Update, view: ClientView, state: State) -> tuple[Update, State]:
        """Whitewash, then prune."""
        clean = {name: torch.nan_to_num(value) for name, value in update.weights.items()}
        return super().protect_update(update.replace(weights=clean), view, state)


@rejected_by("names_and_shapes_are_kept")
@dataclass(frozen=True, kw_only=True)
class LeavesTheRange(DataNoise):
    """Adds noise to inputs without keeping them inside [0, 1].

    Departs from the paper, Cost, Known weakness: wrong on purpose.
    """

    card: ClassVar[DefenseCard] = _card(DataNoise)

    def protect_batch(self, batch: Batch, view: ClientView, state: State) -> tuple[Batch, State]:
        """Add noise, as large as it comes."""
        drawn = torch.randn(batch.inputs.shape, generator=view.generator("noise"), dtype=batch.inputs.dtype)
        return batch.replace(inputs=batch.inputs + self.std * drawn), state


@rejected_by("damaged_payloads_are_refused")
@dataclass(frozen=True, kw_only=True)
class TrustsThePayload(Pruning):
    """Decodes without looking at what it was sent.

    Departs from the paper, Cost, Known weakness: wrong on purpose.
    """

    card: ClassVar[DefenseCard] = _card(Pruning)

    def decode(self, payload: Payload, spec: ModelSpec) -> Update:
        """Fill in whatever is there."""
        weights = {name: torch.zeros(each.shape) for name, each in spec.tensors.items()} | dict(payload.streams["weights"])
        for name, positions in payload.streams["positions"].items():
            weights[name].view(-1)[positions.long()] = payload.streams["values"][name]
        return Update(weights, payload.examples, payload.round)


@rejected_by("none_in_a_chain_changes_nothing", "inputs_are_untouched")
@dataclass(frozen=True, kw_only=True)
class DependsOnItsPlace(Pruning):
    """Changes the batch in place, and behaves differently in a chain because it looks at how its state is named.

    Departs from the paper, Cost, Known weakness: wrong on purpose.
    """

    card: ClassVar[DefenseCard] = _card(Pruning, acts_on=("data", "update", "wire"))

    def prepare(self, data: Batch, view: ClientView) -> State:
        """Darken the client's own data."""
        data.inputs.mul_(0.9)
        return {}

    def protect_batch(self, batch: Batch, view: ClientView, state: State) -> tuple[Batch, State]:
        """Train on it."""
        return batch, state


@dataclass(frozen=True)
class _WrongSign(ClippedUpdateAdversary):
    def on_update(self, update: Named, learner: Learner, variables: Named) -> Named:
        return scale(super().on_update(update, learner, variables), -1.0)


@dataclass(frozen=True)
class _Detached(ClippedUpdateAdversary):
    def on_update(self, update: Named, learner: Learner, variables: Named) -> Named:
        return {name: value.detach() for name, value in super().on_update(update, learner, variables).items()}


@dataclass(frozen=True)
class _Branches(ClippedUpdateAdversary):
    def on_update(self, update: Named, learner: Learner, variables: Named) -> Named:
        return scale(update, self.bound / norm(update)) if bool(norm(update) > self.bound) else update


@dataclass(frozen=True)
class _ComparesNothing(ClippedUpdateAdversary):
    def compare(self, evidence: Named, simulated: Named, variables: Named) -> Comparison:
        zeros = {name: torch.zeros_like(value) for name, value in simulated.items()}
        return Comparison(zeros, super().compare(evidence, simulated, variables).observed)


def _with_adversary(name: str, adversary: type[ClippedUpdateAdversary], *checks: str) -> type[Defense]:
    """File a right clipping with a wrong attacker."""

    def wrong(self: Clipping) -> OpenAdversary:
        return OpenAdversary() if self.bound is None else adversary(self.bound, self.scope)

    text = "Clipping with a wrong attacker.\n\nDeparts from the paper, Cost, Known weakness: wrong on purpose."
    body = {"card": _card(Clipping), "adversary": wrong, "__doc__": text, "__module__": __name__}
    kind: type[Defense] = dataclass(frozen=True, kw_only=True)(type(name, (Clipping,), body))
    return rejected_by(*checks)(kind)


WrongSign = _with_adversary("WrongSign", _WrongSign, "adversary_prefers_the_truth")
Detached = _with_adversary("Detached", _Detached, "adversary_points_somewhere")
Branches = _with_adversary("Branches", _Branches, "adversary_is_safe_under_vmap")
ComparesNothing = _with_adversary(
    "ComparesNothing", _ComparesNothing, "adversary_prefers_the_truth", "adversary_points_somewhere"
)


@dataclass(frozen=True)
class _BelievesInExactness(NoisyUpdateAdversary):
    def arrives(self, observation: Observation) -> WhatArrives:
        names = frozenset(observation.update.weights)
        return super().arrives(observation).replace(exact=lambda: names, noise_std=self.std**2)


@rejected_by("exact_is_exact", "noise_is_as_told")
@dataclass(frozen=True, kw_only=True)
class TakesVarianceForDeviation(GaussianNoise):
    """Its attacker mistakes a variance for a standard deviation and noisy tensors for exact ones.

    Departs from the paper, Cost, Known weakness: wrong on purpose.
    """

    card: ClassVar[DefenseCard] = _card(GaussianNoise)

    def adversary(self) -> OpenAdversary:
        """Return an attacker who expects far too little noise."""
        return _BelievesInExactness(self.std)


@rejected_by("needs_are_real")
@dataclass(frozen=True, kw_only=True)
class HidesWhatItNeeds(Soteria):
    """Looks at the batch, and does not tell callers who have none that it then does nothing.

    Departs from the paper, Cost, Known weakness: wrong on purpose.
    """

    card: ClassVar[DefenseCard] = _card(Soteria)

    def needs(self) -> frozenset[Need]:
        """Say what follows from the hooks alone."""
        return Defense.needs(self)


class _SearchesAsIfThereWereNone(OpenAdversary):
    def arrives(self, observation: Observation) -> WhatArrives:
        return super().arrives(observation).replace(exact=frozenset)


@rejected_by("adversary_undoes_something")
@dataclass(frozen=True, kw_only=True)
class LazyAuthor(Pruning):
    """Pruning with an attacker who says that nothing is exact, and compares as one who ignores the defense.

    Departs from the paper, Cost, Known weakness: wrong on purpose.
    """

    card: ClassVar[DefenseCard] = _card(Pruning)

    def adversary(self) -> OpenAdversary:
        """Return the attacker who knows nothing of it."""
        return _SearchesAsIfThereWereNone()


@rejected_by("needs_are_real")
@dataclass(frozen=True, kw_only=True)
class NeedsWhatItIgnores(Clipping):
    """Refuses parties and senders of finished updates for a loss that it never looks at.

    Departs from the paper, Cost, Known weakness: wrong on purpose.
    """

    card: ClassVar[DefenseCard] = _card(Clipping)

    def needs(self) -> frozenset[Need]:
        """Ask for a loss."""
        return super().needs() | {"loss"}


@rejected_by("card_is_complete", "ladder_builds")
@dataclass(frozen=True, kw_only=True)
class SaysTooLittle(Clipping):
    """Clipping without an honest card."""

    card: ClassVar[DefenseCard] = _card(Clipping, weakness="", acts_on=("data",), ladder=({"bound": 1.0},))
