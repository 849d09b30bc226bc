"""Vertical federated training and prediction: parties send embeddings, the label owner sends their gradients back.

    model = build_parties("resnet18", "cut2", LeftRight(), input_shape=(3, 32, 32), classes=10, seed=Seed(0))
    federation = VerticalFederation.of(model, loss_by_name("cross_entropy"), TrainingSettings(learning_rate=0.1))
    state = federation.train(federation.start(), data, steps=200, minibatch=32)
    logits = federation.predict(state, data.inputs)

Everything that changes is in a `VerticalState` of plain tensors, and every step is a pure function of it and the step's number:
training that was stopped goes on from a saved state to the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vjp

from gradveil.client.embedding import PartyResult, check_vertical, read_embedding, run_party
from gradveil.data.base import Dataset
from gradveil.data.divisions import Division
from gradveil.defenses.base import Defense, State
from gradveil.defenses.none import NoDefense
from gradveil.errors import ReplaceLayer, UsageError
from gradveil.federation.parties import JoinedModel, join_embeddings, share_of
from gradveil.learning.embedding import EMBEDDING, EmbeddingLearner
from gradveil.learning.learner import Learner, optimizer_memory, optimizer_step
from gradveil.learning.losses import Loss
from gradveil.models.batch_norm import batch_norm_layers
from gradveil.randomness import Seed
from gradveil.records import Batch
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named
from gradveil.wire import tensor_bytes

__all__ = ["VerticalFederation", "VerticalState"]

Memory = dict[str, Named]


@dataclass(frozen=True, eq=False)
class VerticalState:
    """Everything training changes.

    Attributes:
        bottoms: Weights of each party's bottom model.
        top: Weights of the label owner's model.
        memories: What the optimiser remembers: of each party, and last of the label owner.
        defenses: What each party's defense keeps; None before its first batch.
        step: Steps taken.
        loss: Training loss of the last step.
        bytes_up: What parties have sent so far.
        bytes_down: What has come back so far.
    """

    bottoms: tuple[Named, ...]
    top: Named
    memories: tuple[Memory, ...]
    defenses: tuple[State | None, ...]
    step: int = 0
    loss: float = float("nan")
    bytes_up: int = 0
    bytes_down: int = 0


@dataclass(frozen=True, eq=False)
class VerticalFederation:
    """Parties with bottom models, a label owner with the top model, and how they train.

    Attributes:
        parties: One learner per party, at its first weights.
        top: The label owner's learner; its model reads joined embeddings.
        division: Who owns which features.
        settings: Optimiser, learning rate and BatchNorm mode.
        defense: What every party does to its data and embeddings, in training and in prediction.
        seed: Root of all randomness.
        public: Public whole inputs a defense may use; each party has its own part of them.
    """

    parties: tuple[EmbeddingLearner, ...]
    top: Learner
    division: Division
    settings: TrainingSettings = field(default_factory=TrainingSettings)
    defense: Defense = field(default_factory=NoDefense)
    seed: Seed = field(default_factory=lambda: Seed(0))
    public: Tensor | None = None

    def __post_init__(self) -> None:
        """Refuse what vertical learning has no place for."""
        check_vertical(self.defense)
        if self.settings.local_steps > 1 or self.settings.epochs or self.settings.clients > 1:
            raise UsageError("parties of vertical learning step together, one batch at a time; leave local steps alone")

    @classmethod
    def of(
        cls,
        model: JoinedModel,
        loss: Loss,
        settings: TrainingSettings | None = None,
        *,
        defense: Defense | None = None,
        seed: Seed | None = None,
        public: Tensor | None = None,
    ) -> VerticalFederation:
        """Copy the parts of a joined model into learners.

        Raises:
            ReplaceLayer: BatchNorm in train mode keeps statistics that this training does not.
        """
        settings = settings or TrainingSettings()
        if settings.batch_norm == "train" and batch_norm_layers(model):
            raise ReplaceLayer(
                "BatchNorm in train mode would need statistics that parties do not exchange; set batch_norm = 'eval', or replace "
                "it by GroupNorm"
            )
        parties = tuple(EmbeddingLearner.of_bottom(bottom, loss, settings) for bottom in model.bottoms)
        top = Learner.of(model.top, loss, settings)
        return cls(parties, top, model.division, settings, defense or NoDefense(), seed or Seed(0), public)

    def to(self, device: torch.device) -> VerticalFederation:
        """Return the same on a device."""
        public = None if self.public is None else self.public.to(device)
        return self.replace(parties=tuple(party.to(device) for party in self.parties), top=self.top.to(device), public=public)

    def start(self) -> VerticalState:
        """Return the state before the first step."""
        everyone = [*(party.weights for party in self.parties), self.top.weights]
        memories = tuple(optimizer_memory(self.settings, weights) for weights in everyone)
        return VerticalState(tuple(everyone[:-1]), everyone[-1], memories, (None,) * len(self.parties))

    def step(self, state: VerticalState, inputs: Tensor, targets: Tensor) -> VerticalState:
        """Take one step of training on a batch of whole inputs; each party looks at its own part only.

        The gradient of the embedding *as sent* comes back, and the party applies it to the embedding as computed: it does not
        know the derivative of what its defense did, and noise has derivative one.
        """
        parts = self.division.split(inputs)
        results = [self._send(state, party, part, targets, "training") for party, part in enumerate(parts)]
        received = [
            read_embedding(result.payload, self.parties[party], tuple(parts[party].shape[1:])).weights[EMBEDDING]
            for party, result in enumerate(results)
        ]

        def loss(top: Named, joined: Tensor) -> Tensor:
            return self.top.objective(top, joined, targets)

        joined = join_embeddings(received, self.division)
        (top_gradient, joined_gradient), value = grad_and_value(loss, argnums=(0, 1))(state.top, joined)
        returned = share_of(joined_gradient, received, self.division)
        gradients = [
            self._bottom_gradient(state.bottoms[party], party, result.trained_batch.inputs, back)
            for party, (result, back) in enumerate(zip(results, returned, strict=True))
        ]
        moved = [
            optimizer_step(self.settings, state.step, weights, gradient, memory)
            for weights, gradient, memory in zip(
                (*state.bottoms, state.top), (*gradients, dict(top_gradient)), state.memories, strict=True
            )
        ]
        weights = [{name: tensor.detach() for name, tensor in own.items()} for own, _ in moved]
        return VerticalState(
            bottoms=tuple(weights[:-1]),
            top=weights[-1],
            memories=tuple(_detached(memory) for _, memory in moved),
            defenses=tuple(result.state for result in results),
            step=state.step + 1,
            loss=float(value),
            bytes_up=state.bytes_up + sum(tensor_bytes(result.payload) for result in results),
            bytes_down=state.bytes_down + sum(back.numel() * back.element_size() for back in returned),
        )

    def train(
        self,
        state: VerticalState,
        data: Dataset,
        *,
        steps: int,
        minibatch: int = 32,
        progress: Callable[[VerticalState], None] | None = None,
    ) -> VerticalState:
        """Take steps until ``steps`` have been taken in all; which records a step sees depends on its number alone.

        Args:
            state: Where to start or go on.
            data: Whole inputs and labels.
            steps: Total, those already in ``state`` included.
            minibatch: Records per step.
            progress: Told the state after every step.
        """
        if steps < 0 or minibatch < 1:
            raise UsageError(f"{steps} steps of {minibatch} records cannot be taken; give whole numbers above 0")
        device = self.top.device
        while state.step < steps:
            generator = self.seed.generator("vertical batches", round=state.step)
            chosen = torch.randint(len(data), (min(minibatch, len(data)),), generator=generator)
            state = self.step(state, data.inputs[chosen].to(device), data.targets[chosen].to(device))
            if progress is not None:
                progress(state)
        return state

    def predict(self, state: VerticalState, inputs: Tensor, *, occasion: int = 0) -> Tensor:
        """Return logits (B, classes) for whole inputs: every party sends its protected embedding, the label owner classifies.

        Args:
            state: The trained parties.
            inputs: (B, ...) whole inputs.
            occasion: Number of this prediction. Noise repeats with it, and noise that is used twice cancels in a difference of
                embeddings: count up.
        """
        targets = torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device)
        parts = self.division.split(inputs)
        sent = [self._send(state, party, part, targets, "prediction", occasion).embedding for party, part in enumerate(parts)]
        with torch.no_grad():
            logits = self.top.logits(state.top, join_embeddings(sent, self.division))
        return logits

    def accuracy(self, state: VerticalState, data: Dataset, *, at_once: int = 256) -> float:
        """Return the share of records classified correctly, with the defense on."""
        device = self.top.device
        hits = 0
        for start in range(0, len(data), at_once):
            part = slice(start, start + at_once)
            found = self.predict(state, data.inputs[part].to(device), occasion=start // at_once).argmax(1).cpu()
            hits += int((found == data.targets[part]).sum())
        return hits / len(data)

    def learner(self, state: VerticalState, party: int) -> EmbeddingLearner:
        """Return a party's bottom model as trained."""
        trained = self.parties[party].replace(weights=state.bottoms[party])
        assert isinstance(trained, EmbeddingLearner)
        return trained

    def party_work(self, state: VerticalState, party: int, inputs: Tensor, targets: Tensor) -> VerticalState:
        """Do what one party does in a step (embed, protect, encode, pull a gradient back), to time it."""
        result = self._send(state, party, self.division.split(inputs)[party], targets, "training")
        self._bottom_gradient(state.bottoms[party], party, result.trained_batch.inputs, torch.ones_like(result.embedding))
        kept = tuple(result.state if index == party else own for index, own in enumerate(state.defenses))
        return dataclasses.replace(state, defenses=kept, step=state.step + 1)

    def _send(self, state: VerticalState, party: int, part: Tensor, targets: Tensor, *occasion: object) -> PartyResult:
        return run_party(
            self.learner(state, party),
            Batch(part, targets),
            self.defense,
            self.seed.child(*occasion, "party", party),
            state=state.defenses[party],
            round_index=state.step,
            public=None if self.public is None else self.division.split(self.public)[party].contiguous(),
        )

    def _bottom_gradient(self, weights: Named, party: int, inputs: Tensor, back: Tensor) -> Named:
        learner = self.parties[party]

        def embed(own: Named) -> Tensor:
            embedding: Tensor = functional_call(learner.model, (own, learner.buffers), (inputs,))
            return embedding

        pulled: Named = vjp(embed, weights)[1](back)[0]
        return pulled

    def replace(self, **changes: object) -> VerticalFederation:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def _detached(memory: Memory) -> Memory:
    return {kind: {name: value.detach() for name, value in named.items()} for kind, named in memory.items()}
