"""Composition: several defenses in a row act as one, in the order given, never reordered."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from gradveil.adversary import OpenAdversary, overrides, prefixed, with_prefix
from gradveil.defenses.base import DEFENSES, AdaptedModel, ClientView, Defense, DefenseCard, Need, State
from gradveil.errors import DefenseOrder, UsageError
from gradveil.learning.learner import GradientHook, Learner
from gradveil.learning.losses import Loss
from gradveil.records import (
    Batch,
    Comparison,
    LabelEvidence,
    ModelSpec,
    Observation,
    Payload,
    Reconstruction,
    Update,
    WhatArrives,
)
from gradveil.registry import spell, split_chain
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named

__all__ = [
    "Chain",
    "ChainAdversary",
    "adapt",
    "build_defense",
    "chain",
    "granularity_of",
    "is_adapted",
    "parts_of",
    "spell_defense",
]

ADAPTED = "gradveil_adapted_by"
"""Attribute of a model that says which defenses adapted it."""


@dataclass(frozen=True, kw_only=True)
class Chain(Defense):
    """Defenses applied one after the other at every station.

    State is keyed by position, randomness by the number of parts before that do something, so that ``none`` on either side
    changes nothing. All parts that change the wire format must agree on one, and at most one may choose aggregation weights.
    """

    card: ClassVar[DefenseCard] = DefenseCard(name="chain", summary="Several defenses in a row.")
    parts: tuple[Defense, ...]

    def __post_init__(self) -> None:
        """Refuse orders that cannot work, and say which could."""
        if not self.parts:
            raise DefenseOrder("a chain needs at least one defense; write 'none' for no defense")
        writers = [part for part in self.parts if part.overrides("encode")]
        if len({part.scheme for part in writers}) > 1:
            names = " and ".join(spell(part) for part in writers)
            raise DefenseOrder(f"only one wire format fits a chain, and {names} have their own; keep one of them")
        choosers = [spell(part) for part in self.parts if part.overrides("layer_weights")]
        if len(choosers) > 1:
            raise DefenseOrder(f"only one defense of a chain can choose aggregation weights, not {' and '.join(choosers)}")
        lossy = next((index for index, part in enumerate(self.parts) if part.lossy_encoding), len(self.parts))
        after = [part for part in self.parts[lossy + 1 :] if part.overrides("protect_update")]
        if after:
            ends = [self.parts[lossy], *(part for part in self.parts[lossy + 1 :] if not part.overrides("protect_update"))]
            better = " + ".join(spell(part) for part in (*self.parts[:lossy], *after, *ends))
            raise DefenseOrder(f"{spell(self.parts[lossy])} acts when the update is encoded, so nothing can follow: {better}")
        gradient = [part for part in self.parts if part.overrides("protect_gradient")]
        late = [part for before, part in pairwise(gradient) if before.granularity == "batch" != part.granularity]
        if late:
            single = [part for part in gradient if part.granularity == "example"]
            rest = [part for part in self.parts if not any(part is other for other in single)]
            better = " + ".join(spell(part) for part in (*single, *rest))
            raise DefenseOrder(f"{spell(late[0])} needs per-example gradients, so it must come first: {better}")

    def _each(self, view: ClientView, state: State) -> list[tuple[Defense, ClientView, State]]:
        each, active = [], 0
        for index, part in enumerate(self.parts):
            stage = (*view.stage, active) if active else view.stage
            each.append((part, view.replace(stage=stage), prefixed(state, f"{index}/")))
            active += bool(part.stations())
        return each

    def _fold(self, hook: str, value: Any, view: ClientView, state: State) -> tuple[Any, State]:
        after: State = {}
        for index, (part, own_view, own_state) in enumerate(self._each(view, state)):
            value, own_state = getattr(part, hook)(value, own_view, own_state)
            after |= with_prefix(own_state, f"{index}/")
        return value, after

    def prepare(self, data: Batch, view: ClientView) -> State:
        """Prepare every part."""
        state: State = {}
        for index, (part, own_view, _) in enumerate(self._each(view, {})):
            state |= with_prefix(part.prepare(data, own_view), f"{index}/")
        return state

    def configure_training(self, settings: TrainingSettings, view: ClientView) -> TrainingSettings:
        """Let every part change the settings in turn."""
        for part, own_view, _ in self._each(view, {}):
            settings = part.configure_training(settings, own_view)
        return settings

    def adapt_model(self, model: nn.Module) -> AdaptedModel:
        """Let every part adapt the model in turn."""
        adapted = AdaptedModel(model)
        for part in self.parts:
            now = part.adapt_model(adapted.model)
            loss = _compose_losses(adapted.adapt_loss, now.adapt_loss)
            adapted = AdaptedModel(now.model, loss, {**adapted.noise_shapes, **now.noise_shapes})
        return adapted

    def protect_batch(self, batch: Batch, view: ClientView, state: State) -> tuple[Batch, State]:
        """Fold over the parts."""
        return self._fold("protect_batch", batch, view, state)

    def protect_gradient(self, gradient: Named, view: ClientView, state: State) -> tuple[Named, State]:
        """Fold over the parts; after the last one that sees single examples, average them."""
        after: State = {}
        single = granularity_of(self) == "example"
        for index, (part, own_view, own_state) in enumerate(self._each(view, state)):
            if single and part.granularity == "batch" and part.overrides("protect_gradient"):
                gradient, single = {name: value.mean(0) for name, value in gradient.items()}, False
            gradient, own_state = part.protect_gradient(gradient, own_view, own_state)
            after |= with_prefix(own_state, f"{index}/")
        if single:
            gradient = {name: value.mean(0) for name, value in gradient.items()}
        return gradient, after

    def protect_embedding(self, embedding: Tensor, view: ClientView, state: State) -> tuple[Tensor, State]:
        """Fold over the parts."""
        return self._fold("protect_embedding", embedding, view, state)

    def protect_update(self, update: Update, view: ClientView, state: State) -> tuple[Update, State]:
        """Fold over the parts."""
        return self._fold("protect_update", update, view, state)

    def _owner(self, hook: str) -> Defense | None:
        return next((part for part in self.parts if part.overrides(hook)), None)

    def encode(self, update: Update, view: ClientView) -> Payload:
        """Let the one part that changes the wire format encode."""
        owner = self._owner("encode")
        return owner.encode(update, view) if owner else super().encode(update, view)

    def decode(self, payload: Payload, spec: ModelSpec) -> Update:
        """Let the one part that changes the wire format decode."""
        owner = self._owner("encode")
        return owner.decode(payload, spec) if owner else super().decode(payload, spec)

    def as_read(self, update: Update, view: ClientView) -> Update:
        """Let the one part that changes the wire format say."""
        owner = self._owner("encode")
        return owner.as_read(update, view) if owner else super().as_read(update, view)

    @property
    def scheme(self) -> str:
        """Return the scheme of the part that changes the wire format."""
        owner = self._owner("encode")
        return owner.scheme if owner else super().scheme

    def layer_weights(self, payloads: Sequence[Payload]) -> list[dict[str, float]] | None:
        """Let the one part that chooses aggregation weights choose."""
        owner = self._owner("layer_weights")
        return owner.layer_weights(payloads) if owner else super().layer_weights(payloads)

    def correct_aggregate(self, total: Update, examples: Sequence[int]) -> Update:
        """Let the parts repair the mean in reverse: what was done last is undone first."""
        for part in reversed(self.parts):
            total = part.correct_aggregate(total, examples)
        return total

    def adversary(self) -> OpenAdversary:
        """Return the composition of the parts' attackers."""
        return ChainAdversary(tuple(part.adversary() for part in self.parts))

    def needs(self) -> frozenset[Need]:
        """Return what any part needs."""
        return frozenset(need for part in self.parts for need in part.needs())

    def quick(self) -> Defense:
        """Return the chain of its parts with less effort."""
        return Chain(parts=tuple(part.quick() for part in self.parts))

    def stations(self) -> tuple[str, ...]:
        """Return the hooks any part overrides."""
        return tuple(hook for hook in super().stations() if any(part.overrides(hook) for part in self.parts))


def _compose_losses(inner: Callable[[Loss], Loss] | None, outer: Callable[[Loss], Loss] | None) -> Callable[[Loss], Loss] | None:
    if inner is None or outer is None:
        return outer or inner
    return lambda loss: outer(inner(loss))


@dataclass(frozen=True)
class ChainAdversary(OpenAdversary):
    """Replays every part in order and compares as the last part that compares in its own way does."""

    parts: tuple[OpenAdversary, ...] = ()

    def _comparers(self) -> list[int]:
        return [i for i, part in enumerate(self.parts) if overrides(part, "compare")]

    def _last(self) -> OpenAdversary:
        comparers = self._comparers()
        return self.parts[comparers[-1]] if comparers else OpenAdversary()

    def arrives(self, observation: Observation) -> WhatArrives:
        """Put together what the parts say.

        Noise adds up where nothing after the first noisy part changes the update otherwise; exact is what every part leaves
        exact. Incomplete when a part is, or when a part that compares in its own way is followed by one that changes the
        update. The round is the first in which every part that rests at some time rests; the label is read by the last part
        that can; how tensors weigh is said by the part that compares.
        """
        told = [part.arrives(observation) for part in self.parts]
        changes = [_changes_update(part, own, observation) for part, own in zip(self.parts, told, strict=True)]
        comparers = self._comparers()
        readers = [own.label_evidence for own in reversed(told) if own.label_evidence is not None]
        return WhatArrives(
            noise_std=_joint_noise([own.noise_std for own, changing in zip(told, changes, strict=True) if changing]),
            exact=lambda: frozenset(observation.update.weights).intersection(*(own.exact() for own in told)),
            incomplete=any(own.incomplete for own in told) or any(any(changes[i + 1 :]) for i in comparers),
            least_protected_round=max(own.least_protected_round for own in told),
            label_evidence=_first_answer(readers) if readers else None,
            equal_weights=bool(comparers) and told[comparers[-1]].equal_weights,
            plain_search=all(own.plain_search for own in told),
            raw_inputs=any(own.raw_inputs for own in told),
        )

    def evidence(self, observation: Observation, round_index: int) -> Named:
        """Return the evidence of the comparing part."""
        return self._last().evidence(observation, round_index)

    def variables(self, observation: Observation, generator: torch.Generator) -> Named:
        """Return the unknowns of all parts, keyed by position."""
        drawn: Named = {}
        for index, part in enumerate(self.parts):
            drawn |= with_prefix(part.variables(observation, generator), f"{index}/")
        return drawn

    def of_client(self, variables: Named, client: int) -> Named:
        """Let every part say which of its unknowns belong to one client."""
        own: Named = {}
        for index, part in enumerate(self.parts):
            own |= with_prefix(part.of_client(prefixed(variables, f"{index}/"), client), f"{index}/")
        return own

    def prepare_learner(self, learner: Learner, variables: Named) -> Learner:
        """Let every part prepare the learner."""
        for index, part in enumerate(self.parts):
            learner = part.prepare_learner(learner, prefixed(variables, f"{index}/"))
        return learner

    def on_examples(self, learner: Learner, variables: Named) -> GradientHook | None:
        """Compose what the parts do to the gradients of single examples."""
        return _compose_hooks([part.on_examples(learner, prefixed(variables, f"{i}/")) for i, part in enumerate(self.parts)])

    def on_gradient(self, learner: Learner, variables: Named) -> GradientHook | None:
        """Compose what the parts do to the gradient of each step."""
        return _compose_hooks([part.on_gradient(learner, prefixed(variables, f"{i}/")) for i, part in enumerate(self.parts)])

    def on_update(self, update: Named, learner: Learner, variables: Named) -> Named:
        """Compose what the parts do to the update."""
        for index, part in enumerate(self.parts):
            update = part.on_update(update, learner, prefixed(variables, f"{index}/"))
        return update

    def compare(self, evidence: Named, simulated: Named, variables: Named) -> Comparison:
        """Compare as the last part does that has its own way."""
        comparers = self._comparers()
        own = prefixed(variables, f"{comparers[-1]}/") if comparers else {}
        return self._last().compare(evidence, simulated, own)

    def penalty(self, variables: Named) -> Tensor:
        """Add the parts' penalties."""
        total = torch.zeros(())
        for index, part in enumerate(self.parts):
            total = total + part.penalty(prefixed(variables, f"{index}/"))
        return total

    def finish(self, reconstruction: Reconstruction, observation: Observation) -> Reconstruction:
        """Undo the parts in reverse."""
        for part in reversed(self.parts):
            reconstruction = part.finish(reconstruction, observation)
        return reconstruction


def _changes_update(part: OpenAdversary, told: WhatArrives, observation: Observation) -> bool:
    """Whether the defense behind ``part`` does something to the finished update, as far as its attacker tells."""
    if overrides(part, "on_update") or overrides(part, "compare") or told.noise_std is not None:
        return True
    return not told.exact() >= observation.update.weights.keys()


def _joint_noise(stds: Sequence[float | None]) -> float | None:
    """Return the noise of parts that change the update together; None where one after the first noisy part adds no noise."""
    first = next((index for index, std in enumerate(stds) if std is not None), len(stds))
    known = [std for std in stds[first:] if std is not None]
    return math.hypot(*known) if known and len(known) == len(stds) - first else None


def _first_answer(readers: Sequence[LabelEvidence]) -> LabelEvidence:
    """Return the reader that asks one after the other until one can tell."""

    def ask(bias: Tensor, prediction: Callable[[], Tensor]) -> Tensor | None:
        answers = (reader(bias, prediction) for reader in readers)
        return next((evidence for evidence in answers if evidence is not None), None)

    return ask


def _compose_hooks(hooks: Sequence[GradientHook | None]) -> GradientHook | None:
    present = [hook for hook in hooks if hook is not None]
    if not present:
        return None

    def all_hooks(step: int, weights: Named, gradient: Named, inputs: Tensor, targets: Tensor) -> Named:
        for hook in present:
            gradient = hook(step, weights, gradient, inputs, targets)
        return gradient

    return all_hooks


def chain(*parts: Defense) -> Defense:
    """Compose defenses in order; one alone is returned as it is, nested chains are flattened."""
    flat: list[Defense] = []
    for part in parts:
        flat.extend(part.parts if isinstance(part, Chain) else (part,))
    return flat[0] if len(flat) == 1 else Chain(parts=tuple(flat))


def build_defense(spelling: str) -> Defense:
    """Build ``clipping(bound=1) + gaussian_noise(std=0.01)``."""
    parts = split_chain(spelling)
    for part in parts:
        if not part and len(parts) > 1:
            raise UsageError(
                f"the chain {spelling!r} has an empty part; write it as clipping(bound=1) + gaussian_noise(std=0.01)"
            )
        if part.endswith(":ladder"):
            name = part.removesuffix(":ladder").partition("(")[0]
            raise UsageError(
                f"{part!r} stands for several strengths, which only an audit takes; choose one that `gradveil show {name}` lists"
            )
    return chain(*(DEFENSES.build(part) for part in parts))


def parts_of(defense: Defense) -> tuple[Defense, ...]:
    """Return the parts of a chain, or the defense alone."""
    return defense.parts if isinstance(defense, Chain) else (defense,)


def granularity_of(defense: Defense) -> Literal["batch", "example"]:
    """Return what the defense's gradient hook is to be given: ``example`` where any part of it sees single examples."""
    return "example" if any(part.granularity == "example" for part in parts_of(defense)) else "batch"


def adapt(defense: Defense, model: nn.Module) -> AdaptedModel:
    """Let a defense adapt a model, and note on it who did: a client of that defense trains no other."""
    found = defense.adapt_model(model)
    if _adapters(defense):
        setattr(found.model, ADAPTED, _adapters(defense))
    return found


def is_adapted(defense: Defense, model: nn.Module) -> bool:
    """Whether a model is one that this defense adapted, if it adapts any."""
    return not _adapters(defense) or getattr(model, ADAPTED, ()) == _adapters(defense)


def _adapters(defense: Defense) -> tuple[str, ...]:
    return tuple(spell(part) for part in parts_of(defense) if part.overrides("adapt_model"))


def spell_defense(defense: Defense) -> str:
    """Return the one-line spelling that `build_defense` reads."""
    return " + ".join(spell(part) for part in parts_of(defense))
