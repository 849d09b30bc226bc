"""The frozen records that cross borders between rooms, and the protocol of an attacker who knows the defense.

One convention everywhere: an update has gradient sign (global minus local weights), and inputs live in [0, 1].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from gradveil.tensors import Named, digest

if TYPE_CHECKING:
    from gradveil.learning.learner import Learner

__all__ = [
    "AdversaryModel",
    "Batch",
    "Comparison",
    "Knowledge",
    "LabelEvidence",
    "ModelSpec",
    "Observation",
    "Payload",
    "Reconstruction",
    "Role",
    "TensorSpec",
    "ThreatModel",
    "Update",
    "WhatArrives",
]


class Role(StrEnum):
    """What a named tensor of a model is for; decides how it is averaged and whether it is protected."""

    WEIGHT = "weight"
    BUFFER = "buffer"
    COUNTER = "counter"


@dataclass(frozen=True)
class TensorSpec:
    """Shape, precision and role of one named tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    role: Role


@dataclass(frozen=True)
class ModelSpec:
    """What the server expects of an update: every name with its shape, precision and role."""

    tensors: Mapping[str, TensorSpec]

    @classmethod
    def of(cls, model: nn.Module) -> ModelSpec:
        """Read the specification off a model."""
        tensors = {n: TensorSpec(tuple(p.shape), p.dtype, Role.WEIGHT) for n, p in model.named_parameters()}
        for name, value in model.named_buffers():
            role = Role.BUFFER if value.is_floating_point() else Role.COUNTER
            tensors[name] = TensorSpec(tuple(value.shape), value.dtype, role)
        return cls(tensors)

    def joined(self, buffers: Named) -> ModelSpec:
        """Return the specification with further buffers, such as running statistics that travel beside the model."""
        more = {
            name: TensorSpec(tuple(value.shape), value.dtype, Role.BUFFER if value.is_floating_point() else Role.COUNTER)
            for name, value in buffers.items()
        }
        return ModelSpec({**self.tensors, **more})

    def named(self, role: Role) -> dict[str, TensorSpec]:
        """Return the tensors of one role."""
        return {name: spec for name, spec in self.tensors.items() if spec.role is role}

    @property
    def parameters(self) -> int:
        """Number of trainable entries."""
        return sum(torch.Size(spec.shape).numel() for spec in self.named(Role.WEIGHT).values())


@dataclass(frozen=True)
class Batch:
    """Inputs (B, ...) in [0, 1], targets (B, ...), and an id per record (may be empty)."""

    inputs: Tensor
    targets: Tensor
    records: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Return the number of examples."""
        return int(self.inputs.shape[0])

    def replace(self, **changes: Any) -> Batch:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Update:
    """What a client computed: weights and buffers in gradient sign, with the number of examples behind them."""

    weights: Named
    examples: int
    round: int = 0
    buffers: Named = field(default_factory=dict)

    def replace(self, **changes: Any) -> Update:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Payload:
    """What crosses the wire: streams of named tensors under a scheme that says how to read them."""

    scheme: str
    streams: Mapping[str, Named]
    examples: int
    round: int = 0
    notes: Mapping[str, float | int | str] = field(default_factory=dict)


class Knowledge(StrEnum):
    """Things an attacker may know beside the update itself."""

    ARCHITECTURE = "architecture and global weights"
    DEFENSE = "the defense and its settings"
    LABELS = "the true labels"
    LEARNING_RATE = "learning rate, local steps and optimiser"
    EXAMPLES = "number of examples behind the update"
    BN_STATISTICS = "BatchNorm statistics of the batch"
    PUBLIC_DATA = "public data of a similar kind"


ORDINARY = frozenset(
    {Knowledge.ARCHITECTURE, Knowledge.DEFENSE, Knowledge.LEARNING_RATE, Knowledge.EXAMPLES, Knowledge.PUBLIC_DATA}
)


@dataclass(frozen=True)
class ThreatModel:
    """Who attacks: what they see, what they know, and whether they only watch.

    Attributes:
        clients: 1 sees one client's update; n > 1 sees only the secure aggregate of n clients.
        rounds: How many rounds of updates on the same data are seen.
        knows: What is known beside the updates.
        active: False for a server that follows the protocol and watches; True for one that alters the model it sends.
        batch_norm: One sentence about the BatchNorm statistics of the model in question; empty where nobody looked.
        sees: ``update`` of a client's weights; ``embedding`` that a party sends for a prediction; ``embedding_gradient``: in
            vertical training, the embedding and the gradient of it that comes back.
        told: Further sentences, on what the model has seen and how clients train.
    """

    clients: int = 1
    rounds: int = 1
    knows: frozenset[Knowledge] = ORDINARY
    active: bool = False
    batch_norm: str = ""
    sees: Literal["update", "embedding", "embedding_gradient"] = "update"
    told: tuple[str, ...] = ()

    def describe(self) -> list[str]:
        """Return the threat model in plain sentences."""
        what = "one client's update" if self.clients == 1 else f"only the secure aggregate of {self.clients} clients"
        rounds = "in one round" if self.rounds == 1 else f"in {self.rounds} rounds on the same data"
        seen = {
            "update": f"The attacker sees {what} {rounds}.",
            "embedding": "The attacker sees the embedding that a party of vertical learning sends for a prediction; no gradient.",
            "embedding_gradient": "The attacker sees, in one step of vertical training, the embedding that one party sends and "
            "the gradient of it that comes back.",
        }
        names = {item: str(item) for item in Knowledge}
        if self.sees != "update":
            names[Knowledge.ARCHITECTURE] = "architecture and weights of the party's bottom model"
            names[Knowledge.EXAMPLES] = "number of records behind the embedding"
        known = [name for item, name in names.items() if item in self.knows]
        unknown = [name for item, name in names.items() if item not in self.knows]
        return [
            seen[self.sees],
            f"The attacker knows: {'; '.join(known) or 'nothing else'}.",
            f"The attacker does not know: {'; '.join(unknown) or 'nothing is withheld'}.",
            *([self.batch_norm] if self.batch_norm else []),
            *self.told,
            "The attacker alters the model it sends." if self.active else "The attacker follows the protocol and only watches.",
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the threat model as plain JSON values."""
        return {
            "clients": self.clients,
            "rounds": self.rounds,
            "knows": sorted(item.name.lower() for item in self.knows),
            "active": self.active,
            "sees": self.sees,
            "sentences": self.describe(),
        }


@dataclass(frozen=True)
class Comparison:
    """Two sets of named tensors that coincide at the truth: what was seen, and what the dummies would have produced."""

    simulated: Named
    observed: Named

    def residuals(self) -> Named:
        """Return simulated minus observed; zero at the truth when the release carries no noise."""
        return {name: value - self.observed[name] for name, value in self.simulated.items()}


LabelEvidence = Callable[[Tensor, Callable[[], Tensor]], Tensor | None]
"""``(last bias as sent, mean prediction of the global model) -> evidence per class``, the lower the likelier, or None."""


@dataclass(frozen=True)
class WhatArrives:
    """What an attacker who knows the defense can say about one observation before any search.

    Whatever costs something to find out is a function, so that who does not ask does not pay.

    Attributes:
        noise_std: Known standard deviation of Gaussian noise on the compared tensors; None where there is none of known law.
        exact: Names the tensors that arrive exactly, up to one positive factor per layer.
        incomplete: Whether this attacker knows less than the whole defense of what was seen here; the row is flagged.
        least_protected_round: Index of the round seen that is protected least, for attacks that read one round only.
        label_evidence: Reads the label of one example off the last bias of that round, whichever update of this client it came
            with; classes it finds equally likely are told apart by the rest of the layer. None, or None as its answer, reads the
            bias as the gradient it is without a defense.
        equal_weights: Whether loud tensors that tell little drown quiet ones that tell much, so that a search should weigh
            all tensors alike.
        plain_search: Whether the search is, step by step, that of an attacker who ignores the defense.
        raw_inputs: Whether the dummies stand for the client's raw inputs rather than for those it trained on.
    """

    noise_std: float | None = None
    exact: Callable[[], frozenset[str]] = frozenset
    incomplete: bool = False
    least_protected_round: int = 0
    label_evidence: LabelEvidence | None = None
    equal_weights: bool = False
    plain_search: bool = False
    raw_inputs: bool = False

    def replace(self, **changes: Any) -> WhatArrives:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)


class AdversaryModel(Protocol):
    """The attacker who knows the defense. Methods that take no observation must be safe under ``torch.func.vmap``.

    A batched attack stacks the *evidence* of many observations, so whatever a method needs of an observation is put there once.
    """

    def arrives(self, observation: Observation) -> WhatArrives:
        """Say what is known about this observation: its noise, what is exact, and what this attacker does not know."""
        ...

    def evidence(self, observation: Observation, round_index: int) -> Named:
        """Extract, as named tensors of fixed shape, what is compared with in one round."""
        ...

    def variables(self, observation: Observation, generator: torch.Generator) -> Named:
        """Draw starting values of the unknowns to optimise jointly with the dummies."""
        ...

    def replay(self, learner: Learner, inputs: Tensor, targets: Tensor, variables: Named) -> Named:
        """Produce what the client would have produced from the dummies."""
        ...

    def compare(self, evidence: Named, simulated: Named, variables: Named) -> Comparison:
        """Bring simulation and evidence to the form in which they coincide at the truth."""
        ...

    def penalty(self, variables: Named) -> Tensor:
        """Return the negative log-prior of the unknowns."""
        ...

    def finish(self, reconstruction: Reconstruction, observation: Observation) -> Reconstruction:
        """Undo what can only be undone on the finished images: de-blend, denoise, subtract."""
        ...


@dataclass(frozen=True)
class Observation:
    """All an attacker has. True inputs are not reachable from here.

    Attributes:
        learners: The client's training as a differentiable function, one per round seen.
        updates: The decoded updates, one per round.
        payloads: What really crossed the wire, one per round.
        input_shape: Shape of one input.
        classes: Number of classes, 0 where targets are not classes.
        examples: Number of inputs behind the update, over all clients of an aggregate.
        threat: What the attacker sees and knows.
        adversary: The defense's own attacker model.
        labels: True targets, only where the threat model grants them.
        public: (P, ...) public inputs that the clients had too, where the attacker knows public data.
        own: (P, ...) public inputs of the attacker's own, to learn from, where it is not known what the clients had.
    """

    learners: tuple[Learner, ...]
    updates: tuple[Update, ...]
    payloads: tuple[Payload, ...]
    input_shape: tuple[int, ...]
    classes: int
    examples: int
    threat: ThreatModel
    adversary: AdversaryModel
    labels: Tensor | None = None
    public: Tensor | None = None
    own: Tensor | None = None

    @property
    def pictures(self) -> Tensor | None:
        """Public inputs to learn from: those of the attacker's own, else those that the clients had too."""
        return self.public if self.own is None else self.own

    @cached_property
    def content(self) -> str:
        """Digest of the updates seen, which tells observations apart by content."""
        return digest(*(update.weights for update in self.updates))

    @property
    def update(self) -> Update:
        """The first update seen."""
        return self.updates[0]

    @property
    def learner(self) -> Learner:
        """The learner of the first round seen."""
        return self.learners[0]

    @property
    def clearest(self) -> Observation:
        """The same with only the round that is protected least, as far as the attacker knows the defense."""
        if len(self.updates) == 1 or Knowledge.DEFENSE not in self.threat.knows:
            return self
        index = self.adversary.arrives(self).least_protected_round
        return self.replace(
            learners=(self.learners[index],), updates=(self.updates[index],), payloads=self.payloads[index : index + 1]
        )

    def replace(self, **changes: Any) -> Observation:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Reconstruction:
    """One candidate rebuilt by an attack, with what is needed to judge whether the attack worked as such.

    Attributes:
        inputs: (B, ...) in [0, 1].
        targets: (B,) class indices, or soft targets.
        target: Index of the observation it belongs to.
        recipe: Name of the attack recipe that made it.
        stance: How the recipe treated the defense: plain, informed, straight_through, averaged, zero_mask.
        restart: Which of the recipe's restarts.
        variables: The defense's unknowns as fitted.
        unfinished: Inputs before the informed attacker's finishing touch, where it had one; what the update was matched with.
        first_loss: Objective at the start.
        best_loss: Objective at the kept iterate.
        gradient_norm: Norm of the objective's gradient with respect to the dummies at the start.
        steps: Optimisation steps spent.
        status: finished, stopped early, not finite.
        oracle_labels: True when true labels were handed in.
        hypothesis: Which of the plausible labels it was searched with, the most probable being 0.
    """

    inputs: Tensor
    targets: Tensor
    recipe: str
    target: int = 0
    stance: str = "plain"
    restart: int = 0
    variables: Named = field(default_factory=dict)
    unfinished: Tensor | None = None
    first_loss: float = float("nan")
    best_loss: float = float("nan")
    gradient_norm: float = float("nan")
    steps: int = 0
    status: str = "finished"
    oracle_labels: bool = False
    hypothesis: int = 0

    def replace(self, **changes: Any) -> Reconstruction:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)
