"""The small world in which the contract of a defense is checked: a tiny network with awkward parameters, and its client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.client.embedding import read_embedding, run_party
from gradveil.client.update import run_client
from gradveil.defenses.base import ClientView, Defense
from gradveil.defenses.chain import Chain, adapt, granularity_of
from gradveil.learning.embedding import EMBEDDING, EmbeddingLearner
from gradveil.learning.learner import Learner
from gradveil.learning.losses import Loss, cross_entropy
from gradveil.randomness import Seed
from gradveil.records import Batch, ModelSpec, Observation, Payload, Role, TensorSpec, ThreatModel, Update
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named
from gradveil.wire.files import payload_from_bytes, payload_to_bytes

__all__ = ["EmbeddingScene", "Scene", "at", "distance", "spared", "steeper_loss"]

CLASSES = 5
SHAPE = (3, 8, 8)
EXAMPLES = 3


class TinyNet(nn.Module):
    """A convolution and a linear layer with sigmoids between, and what many defenses forget: a scalar and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.gain = nn.Parameter(torch.tensor(2.0))
        self.head = nn.Linear(64, CLASSES)
        self.unused = nn.Parameter(torch.empty(0))

    def forward(self, inputs: Tensor) -> Tensor:
        """(B, 3, 8, 8) -> (B, CLASSES)."""
        outputs: Tensor = self.head(self.features(inputs).flatten(1))
        return outputs

    def features(self, inputs: Tensor) -> Tensor:
        """(B, 3, 8, 8) -> (B, 4, 4, 4)."""
        return torch.sigmoid(self.gain * self.conv(inputs))


class TinyBottom(TinyNet):
    """The first half of the same network, as a party of vertical learning has it."""

    def forward(self, inputs: Tensor) -> Tensor:
        """(B, 3, 8, 8) -> (B, 4, 4, 4)."""
        return self.features(inputs)


def steeper_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Ten times the cross-entropy, so that gradients are longer than the bounds that clip them."""
    return 10 * cross_entropy(outputs, targets)


@dataclass(frozen=True, eq=False)
class Scene:
    """A learner with a defense's model, a client's batch, and the ways to send them through the defense.

    Attributes:
        learner: The tiny network, adapted by the defense where it adapts models.
        batch: The client's data.
    """

    learner: Learner
    batch: Batch

    @classmethod
    def of(
        cls,
        defense: Defense,
        *,
        settings: TrainingSettings | None = None,
        dtype: torch.dtype = torch.float32,
        loss: Loss = steeper_loss,
    ) -> Scene:
        """Build the world around one defense; the same bits every time, and no global generator is moved."""
        if set(defense.stations()) - {"prepare"} == {"protect_embedding"}:
            return EmbeddingScene.of_party(dtype)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            adapted = adapt(defense, TinyNet())
        settings = settings or TrainingSettings()
        loss = adapted.adapt_loss(loss) if adapted.adapt_loss else loss
        noise = {n: torch.zeros((settings.steps(EXAMPLES), EXAMPLES, *shape)) for n, shape in adapted.noise_shapes.items()}
        learner = Learner.of(adapted.model, loss, settings).replace(noise=noise)
        return cls(learner.to(dtype), draw_batch(0, dtype))

    @property
    def spec(self) -> ModelSpec:
        """What the server expects."""
        return ModelSpec.of(self.learner.model)

    def view(self, seed: int = 1) -> ClientView:
        """What the client may use, at the first step."""
        return ClientView(
            learner=self.learner, seed=Seed(seed), weights=self.learner.weights, raw_batch=self.batch, batch=self.batch
        )

    def update(self, weights: Named | None = None) -> Update:
        """An update of ordinary size with all the model's names; always the same, unless ``weights`` are given."""
        return Update(weights=weights if weights is not None else self.gradient(), examples=EXAMPLES, round=2)

    def gradient(self) -> Named:
        """The gradient of the batch."""
        return self.learner.gradient(self.learner.weights, self.batch.inputs, self.batch.targets)

    def release(self, defense: Defense, weights: Named, seed: int = 1) -> Update:
        """Send given tensors through the gradient hook, the update hook, the wire and back."""
        view = self.view(seed)
        state = defense.prepare(self.batch, view)
        single = granularity_of(defense) == "example"
        given = {name: value.unsqueeze(0) for name, value in weights.items()} if single else weights
        given, state = defense.protect_gradient(given, view, state)
        if single and not isinstance(defense, Chain):
            given = {name: value.mean(0) for name, value in given.items()}
        update, _ = defense.protect_update(self.update(given), view, state)
        return self.deliver(defense, defense.encode(update, view), spec_of(weights))

    def through_hooks(self, defense: Defense, view: ClientView) -> Named:
        """Return what the hooks of data, gradient and update make of the scene's own batch and gradient under a given view."""
        single = granularity_of(defense) == "example"
        gradient = {name: value.unsqueeze(0) if single else value for name, value in self.gradient().items()}
        view = view.replace(raw_gradient=gradient)
        batch, state = defense.protect_batch(self.batch, view, defense.prepare(self.batch, view))
        gradient, state = defense.protect_gradient(gradient, view, state)
        if single and not isinstance(defense, Chain):
            gradient = {name: value.mean(0) for name, value in gradient.items()}
        update, _ = defense.protect_update(self.update(gradient), view, state)
        return {**update.weights, "inputs": batch.inputs}

    def deliver(self, defense: Defense, payload: Payload, spec: ModelSpec | None = None) -> Update:
        """Carry a payload over the wire, as bytes."""
        return defense.decode(payload_from_bytes(payload_to_bytes(payload)), spec or self.spec)

    def payload(self, defense: Defense, seed: int = 1, batch: Batch | None = None, round_index: int = 0) -> Payload:
        """Run the real client and return what it sends."""
        return run_client(self.learner, batch or self.batch, defense, Seed(seed), round_index=round_index).payload

    def trained(self, defense: Defense, seed: int, batch: Batch) -> Batch:
        """Run the real client and return what it trained on."""
        return run_client(self.learner, batch, defense, Seed(seed)).trained_batch

    def send(self, defense: Defense, seed: int = 1, batch: Batch | None = None, round_index: int = 0) -> Update:
        """Run the real client and read what arrives."""
        return self.deliver(defense, self.payload(defense, seed, batch, round_index))

    def observe(self, defense: Defense, seed: int, batch: Batch) -> Observation:
        """Run the real client and hand what arrives to its attacker."""
        payload = self.payload(defense, seed, batch)
        return Observation(
            learners=(self.learner,),
            updates=(self.deliver(defense, payload),),
            payloads=(payload,),
            input_shape=SHAPE,
            classes=CLASSES,
            examples=len(batch),
            threat=ThreatModel(),
            adversary=defense.adversary(),
        )


@dataclass(frozen=True, eq=False)
class EmbeddingScene(Scene):
    """The same for defenses of vertical learning: what is sent is the embedding of a party's batch."""

    @classmethod
    def of_party(cls, dtype: torch.dtype = torch.float32) -> EmbeddingScene:
        """Build the world of one party; the same bits every time, and no global generator is moved."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            bottom = TinyBottom()
        return cls(EmbeddingLearner.of_bottom(bottom, steeper_loss).to(dtype), draw_batch(0, dtype))

    @property
    def party(self) -> EmbeddingLearner:
        """The learner, as what it is."""
        assert isinstance(self.learner, EmbeddingLearner)
        return self.learner

    @property
    def spec(self) -> ModelSpec:
        """What the receiver expects."""
        return spec_of(self.gradient())

    def gradient(self) -> Named:
        """The embedding of the batch."""
        return {EMBEDDING: self.party.embed(self.batch.inputs)}

    def release(self, defense: Defense, weights: Named, seed: int = 1) -> Update:
        """Send a given embedding through the hook, the wire and back."""
        view = self.view(seed)
        sent, _ = defense.protect_embedding(weights[EMBEDDING], view, defense.prepare(self.batch, view))
        return self.deliver(defense, defense.encode(self.update({EMBEDDING: sent}), view), spec_of(weights))

    def through_hooks(self, defense: Defense, view: ClientView) -> Named:
        """Return what the hooks of data and embedding make of the scene's own batch under a given view."""
        batch, state = defense.protect_batch(self.batch, view, defense.prepare(self.batch, view))
        return {EMBEDDING: defense.protect_embedding(self.gradient()[EMBEDDING], view, state)[0], "inputs": batch.inputs}

    def payload(self, defense: Defense, seed: int = 1, batch: Batch | None = None, round_index: int = 0) -> Payload:
        """Run the real party and return what it sends."""
        return run_party(self.party, batch or self.batch, defense, Seed(seed), round_index=round_index).payload

    def trained(self, defense: Defense, seed: int, batch: Batch) -> Batch:
        """Run the real party and return what it embedded."""
        return run_party(self.party, batch, defense, Seed(seed)).trained_batch

    def send(self, defense: Defense, seed: int = 1, batch: Batch | None = None, round_index: int = 0) -> Update:
        """Run the real party and read what arrives, for as many records as were sent."""
        return read_embedding(self.payload(defense, seed, batch, round_index), self.party, SHAPE)

    def observe(self, defense: Defense, seed: int, batch: Batch) -> Observation:
        """Run the real party and hand what arrives to its attacker."""
        payload = self.payload(defense, seed, batch)
        update = read_embedding(payload, self.party, SHAPE)
        return Observation(
            learners=(self.learner,),
            updates=(update,),
            payloads=(payload,),
            input_shape=SHAPE,
            classes=CLASSES,
            examples=len(batch),
            threat=ThreatModel(),
            adversary=defense.adversary(),
        )


def draw_batch(seed: int, dtype: torch.dtype = torch.float32) -> Batch:
    """Draw inputs in [0, 1] and classes."""
    generator = torch.Generator().manual_seed(100 + seed)
    inputs = torch.rand((EXAMPLES, *SHAPE), generator=generator).to(dtype)
    targets = torch.randint(CLASSES, (EXAMPLES,), generator=generator)
    return Batch(inputs, targets, tuple(f"record {index}" for index in range(EXAMPLES)))


def spec_of(weights: Named) -> ModelSpec:
    """Return the specification that given weights fulfil."""
    return ModelSpec({name: TensorSpec(tuple(value.shape), value.dtype, Role.WEIGHT) for name, value in weights.items()})


def distance(left: Named, right: Named) -> float:
    """Return ‖left - right‖ / ‖right‖ over all tensors, in double precision."""
    gap = sum(float((left[name].double() - value.double()).square().sum()) for name, value in right.items())
    size = sum(float(value.double().square().sum()) for value in right.values())
    return float((gap / max(size, 1e-300)) ** 0.5)


def at(defense: Defense, setting: Any) -> Defense:
    """Return the same kind of defense at a setting of its card, with no more effort than it needs to be looked at."""
    return spared(type(defense)(**dict(setting)))


def spared(defense: Defense) -> Defense:
    """Return the defense as it is, or its quick twin where that one is quicker here.

    The quick twin of a defense that decomposes a Jacobian looks for the leading part alone; that of a network this small takes
    several times as long as the whole.
    """
    twin = defense.quick()
    return defense if getattr(twin, "mode", "") == "leading" else twin
