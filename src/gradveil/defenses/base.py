"""The contract of a defense: a frozen, keyword-only dataclass that is its own configuration.

There is one hook per station on the road of an update, in the order data meets them, each a no-op here; a defense overrides
the few it needs. Hooks are pure: they return new values, draw randomness only from ``view.generator``, and keep no state on
the object. State comes in and goes out as named tensors, so that a killed run resumes and a chain can key it by position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from gradveil.adversary import OpenAdversary
from gradveil.errors import UsageError
from gradveil.learning.learner import Learner
from gradveil.learning.losses import Loss
from gradveil.randomness import Seed
from gradveil.records import Batch, ModelSpec, Payload, Update
from gradveil.registry import Card, Registry
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named
from gradveil.wire.dense import DENSE, decode_dense, encode_dense

__all__ = ["DEFENSES", "HOOKS", "MEASURED", "NEEDS", "AdaptedModel", "ClientView", "Defense", "DefenseCard", "Need", "State"]

State = Named
Setting = Mapping[str, Any]

MEASURED = "measured_"
"""Scalars of the state under this prefix are what a defense tells about itself; trainings and audits show their mean."""

HOOKS = (
    "prepare",
    "configure_training",
    "adapt_model",
    "protect_batch",
    "protect_gradient",
    "protect_embedding",
    "protect_update",
    "encode",
    "layer_weights",
    "correct_aggregate",
)

Need = Literal["batch", "records", "public", "loss", "gradient", "adapted_model", "training_loop"]
"""What a defense may need of whoever calls its hooks, beside the update itself."""

NEEDS: Mapping[Need, str] = {
    "batch": "the client's own inputs",
    "records": "the ids of its records",
    "public": "public inputs",
    "loss": "the labels and the training loss",
    "gradient": "the gradient of every local step",
    "adapted_model": "a model of its own making that everybody trains",
    "training_loop": "a say in how local training goes",
}
_NEED_OF_HOOK: Mapping[str, Need] = {
    "prepare": "batch",
    "configure_training": "training_loop",
    "adapt_model": "adapted_model",
    "protect_batch": "batch",
    "protect_gradient": "gradient",
}


@dataclass(frozen=True, kw_only=True)
class DefenseCard(Card):
    """A card with what a user of a defense must know.

    Attributes:
        acts_on: The stations it changes, in words for people: data, gradient, update, model, wire.
        ladder: Three to five settings from weak to strong.
        off: Settings under which it is the identity, or None where there are none.
        random: Whether it draws randomness.
        secure_aggregation: Whether it works when the server sees only sums of updates.
        reconstruction_of_paper: True where the paper's settings are not public and ours are a reading of it.
    """

    acts_on: tuple[str, ...] = ()
    ladder: tuple[Setting, ...] = ()
    off: Setting | None = None
    random: bool = False
    secure_aggregation: bool = True
    reconstruction_of_paper: bool = False


DEFENSES: Registry[type[Defense], DefenseCard] = Registry("defense", "gradveil.defenses")


@dataclass(frozen=True)
class ClientView:
    """What a client may use while it protects an update.

    Attributes:
        learner: The global model with loss and settings.
        seed: Root of this client's randomness in this round; `generator` derives from it.
        round: Federated round.
        step: Local step within the round.
        weights: Local weights at this step; equal to the global ones at step 0.
        raw_batch: The batch before any hook changed it.
        batch: The batch that is trained on.
        raw_gradient: The gradient before any hook changed it, where there is one.
        public: Public inputs a client may use, if any.
        stage: Position in a chain.
    """

    learner: Learner
    seed: Seed
    round: int = 0
    step: int = 0
    weights: Named = field(default_factory=dict)
    raw_batch: Batch | None = None
    batch: Batch | None = None
    raw_gradient: Named | None = None
    public: Tensor | None = None
    stage: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse public inputs of another shape than the records, on which a defense would fail somewhere deep inside."""
        if self.public is not None and self.raw_batch is not None and self.public.shape[1:] != self.raw_batch.inputs.shape[1:]:
            shapes = [" × ".join(map(str, each.shape[1:])) for each in (self.public, self.raw_batch.inputs)]
            raise UsageError(f"public inputs are {shapes[0]} and the client's records {shapes[1]}; bring them to one shape")

    def generator(self, role: str) -> torch.Generator:
        """Return this step's generator for one use; two hooks never share a stream."""
        seed = self.seed.child("stage", *self.stage, "step", self.step)
        return seed.generator(role, round=self.round, device=self.device)

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return self.learner.device

    def replace(self, **changes: Any) -> ClientView:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class AdaptedModel:
    """A model changed by a defense, with the loss it needs and the noise it draws.

    Attributes:
        model: Takes ``(inputs, **noise)``.
        adapt_loss: Wraps the task loss; receives whatever the adapted model returns.
        noise_shapes: Shape per example of each noise tensor, drawn from N(0, 1) at every step.
    """

    model: nn.Module
    adapt_loss: Callable[[Loss], Loss] | None = None
    noise_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Defense:
    """Base of all defenses: does nothing at every station."""

    card: ClassVar[DefenseCard]
    granularity: ClassVar[Literal["batch", "example"]] = "batch"
    lossy_encoding: ClassVar[bool] = False
    """Whether `encode` itself changes the update, so that no later part of a chain can change it any more."""

    def prepare(self, data: Batch, view: ClientView) -> State:
        """Return the state this client starts with, from its own data."""
        return {}

    def configure_training(self, settings: TrainingSettings, view: ClientView) -> TrainingSettings:
        """Return the settings of local training."""
        return settings

    def adapt_model(self, model: nn.Module) -> AdaptedModel:
        """Return the model all parties train; called once, before training."""
        return AdaptedModel(model)

    def protect_batch(self, batch: Batch, view: ClientView, state: State) -> tuple[Batch, State]:
        """Return the batch to train on."""
        return batch, state

    def protect_gradient(self, gradient: Named, view: ClientView, state: State) -> tuple[Named, State]:
        """Return the gradient of one step; with ``granularity = "example"`` tensors have a leading axis over examples."""
        return gradient, state

    def protect_embedding(self, embedding: Tensor, view: ClientView, state: State) -> tuple[Tensor, State]:
        """Return the embedding a party of vertical learning sends."""
        return embedding, state

    def protect_update(self, update: Update, view: ClientView, state: State) -> tuple[Update, State]:
        """Return the update of one round."""
        return update, state

    def encode(self, update: Update, view: ClientView) -> Payload:
        """Return what crosses the wire."""
        return encode_dense(update)

    def decode(self, payload: Payload, spec: ModelSpec) -> Update:
        """Return the update the server reads from a payload, or raise `BadUpdate`."""
        return decode_dense(payload, spec)

    def as_read(self, update: Update, view: ClientView) -> Update:
        """Return what the server would read, by arithmetic alone where that can be, so that many clients can be run at once."""
        if not self.lossy_encoding:
            return update
        return self.decode(self.encode(update, view), ModelSpec.of(view.learner.model))

    @property
    def scheme(self) -> str:
        """Name of the wire scheme that `encode` writes."""
        return DENSE

    def layer_weights(self, payloads: Sequence[Payload]) -> list[dict[str, float]] | None:
        """Return, per payload, the aggregation weight of each tensor; None averages by number of examples."""
        return None

    def correct_aggregate(self, total: Update, examples: Sequence[int]) -> Update:
        """Return the server's mean after what the defense repairs there, given how many examples each client counted for."""
        return total

    def adversary(self) -> OpenAdversary:
        """Return the attacker who knows this defense."""
        return OpenAdversary()

    def quick(self) -> Defense:
        """Return the same defense with less effort, where some can be spared: for attackers who simulate it hundreds of times."""
        return self

    @property
    def random(self) -> bool:
        """Whether it draws randomness at these settings; the card says whether it does at some."""
        return type(self).card.random

    def needs(self) -> frozenset[Need]:
        """Return what a caller must give at these settings; without it, the defense would do less than it says.

        What follows from the overridden hooks is here; a defense adds what its hooks read off the view: the batch, the loss,
        public inputs, ids. What it merely uses where it is given is no need.
        """
        derived: set[Need] = {need for hook, need in _NEED_OF_HOOK.items() if self.overrides(hook)}
        # Nobody but the loop itself has gradients of single examples.
        return frozenset(derived | {"training_loop"} if "gradient" in derived and self.granularity == "example" else derived)

    @classmethod
    def overrides(cls, hook: str) -> bool:
        """Whether this defense does something at a station."""
        return getattr(cls, hook) is not getattr(Defense, hook)

    def stations(self) -> tuple[str, ...]:
        """Return the hooks this defense overrides, in order."""
        return tuple(hook for hook in HOOKS if self.overrides(hook))
