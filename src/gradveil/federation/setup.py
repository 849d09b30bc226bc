"""Before the first round: records dealt out to clients, the model as the defense adapts it, everything on its device."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradveil import tensors
from gradveil.client.local_training import tracked_buffers
from gradveil.data import PARTITIONS, Dataset, load_source, public_images
from gradveil.defenses import Defense, adapt, build_defense
from gradveil.defenses.base import AdaptedModel
from gradveil.errors import UsageError
from gradveil.learning import Learner, Loss, loss_by_name
from gradveil.learning.dropout import with_dropout
from gradveil.learning.task import dice, f1_score
from gradveil.models import build_model
from gradveil.models.batch_norm import batch_norm_layers
from gradveil.models.shared_layers import separate_layers
from gradveil.randomness import Seed
from gradveil.records import Batch, ModelSpec
from gradveil.study.federation import FederationSettings
from gradveil.study.local_training import TrainingSettings
from gradveil.study.reading import read_options
from gradveil.tensors import Named, find_device

__all__ = ["Federation", "Scores", "build_federation", "load_both"]

PUBLIC = 32
"""Public inputs a defense may use; see `gradveil.data.public_images`."""

EVALUATION_BATCH = {"cpu": 64, "cuda": 1024}
"""What fits a core's cache; what fills a GPU."""


@dataclass(frozen=True)
class Scores:
    """How good a model is on the test records.

    Attributes:
        accuracy: Share classified right; of masks, the mean Dice.
        loss: Mean task loss.
        f1: F1 of class 1, where there are two classes.
    """

    accuracy: float
    loss: float
    f1: float | None = None


@dataclass(frozen=True, eq=False)
class Federation:
    """All that stays the same from round to round.

    Attributes:
        settings: As asked for.
        train: The clients' records.
        test: Records that this training does not use.
        test_from: Where they come from, in words.
        parts: Rows of ``train`` that each client owns.
        defense: What every client runs.
        learner: Local training at the first weights.
        evaluator: The same model with running statistics, for evaluation.
        task_loss: The loss without what the defense adds to it.
        noise_shapes: Shape per example of each noise tensor an adapted model draws.
        spec: What the server expects of an update.
        tracked: Names of the running statistics that travel.
        inputs: The training inputs on the device.
        targets: The training targets on the device.
        public: Public inputs on the device.
    """

    settings: FederationSettings
    train: Dataset
    test: Dataset
    test_from: str
    parts: tuple[tuple[int, ...], ...]
    defense: Defense
    learner: Learner
    evaluator: Learner
    task_loss: Loss
    noise_shapes: dict[str, tuple[int, ...]]
    spec: ModelSpec
    tracked: tuple[str, ...]
    inputs: Tensor
    targets: Tensor
    public: Tensor

    @property
    def seed(self) -> Seed:
        """Root of all randomness."""
        return Seed(self.settings.seed)

    @property
    def _mixes(self) -> bool:
        """Whether records of a minibatch are normalised together."""
        return self.settings.batch_norm == "train" and bool(batch_norm_layers(self.learner.model))

    @property
    def dense_bytes(self) -> int:
        """Bytes of one update without any encoding."""
        sent = [*self.learner.weights.values(), *(self.evaluator.buffers[name] for name in self.tracked)]
        return sum(value.numel() * value.element_size() for value in sent)

    def sample(self, round_index: int) -> list[int]:
        """Draw the clients of a round; the draw depends on the seed and the round alone."""
        random = self.seed.child("sampling").numpy("clients", round=round_index)
        return sorted(int(c) for c in random.choice(self.settings.clients, self.settings.clients_per_round, replace=False))

    def batch(self, client: int, round_index: int) -> Batch:
        """Return a client's records in this round's order."""
        rows = self.parts[client]
        order = self.seed.child("order").numpy("records", client=client, round=round_index).permutation(len(rows))
        chosen = [rows[place] for place in order]
        if self._mixes and self.settings.minibatch and not self.settings.local_steps:
            # One record has no variance: a last minibatch of one would stop BatchNorm. Another record is left out each round.
            chosen = chosen[: len(chosen) - (len(chosen) % self.settings.minibatch == 1)]
        index = torch.tensor(chosen, device=self.inputs.device)
        return Batch(self.inputs[index], self.targets[index], tuple(self.train.records[row] for row in chosen))

    def local_learner(self, weights: Named, examples: int) -> Learner:
        """Return a client's learner at the global weights, with the shapes of the noise its model draws."""
        settings = self.learner.settings
        shape = (settings.steps(examples), examples)
        # Only the shape is read, so nothing of that size is kept.
        blank = next(iter(weights.values())).new_zeros(())
        noise = {name: blank.expand(*shape, *value.shape[2:]) for name, value in self.learner.noise.items()}
        return self.learner.replace(weights=weights, noise=noise)

    @property
    def score(self) -> str:
        """What the accuracy of this data is: ``accuracy``, or ``dice`` of masks."""
        return "dice" if self.train.dense else "accuracy"

    def evaluate(self, weights: Named, buffers: Named) -> tuple[float, float]:
        """Return accuracy (of masks, the mean Dice) and mean loss over the test records."""
        found = self.scores(weights, buffers)
        return found.accuracy, found.loss

    @torch.no_grad()
    def scores(self, weights: Named, buffers: Named) -> Scores:
        """Score a model on the test records; noise an adapted model draws is left at its mean, zero."""
        evaluator = self.evaluator.replace(buffers=buffers)
        device = self.inputs.device
        right, total = torch.zeros((), device=device, dtype=torch.float64), torch.zeros((), device=device, dtype=torch.float64)
        predicted = []
        size = EVALUATION_BATCH.get(device.type, 64)
        for start in range(0, len(self.test), size):
            inputs, targets = (each[start : start + size].to(device) for each in (self.test.inputs, self.test.targets))
            noise = {name: inputs.new_zeros((len(inputs), *shape)) for name, shape in self.noise_shapes.items()}
            logits = evaluator.logits(weights, inputs, noise)
            if self.train.dense:
                right += dice(logits > 0, targets).sum()
            else:
                predicted.append(logits.argmax(1))
                right += (predicted[-1] == targets).sum()
            total += self.task_loss(logits, targets) * len(inputs)
        two = self.train.classes == 2 and not self.train.dense
        f1 = f1_score(torch.cat(predicted).cpu(), self.test.targets) if two else None
        return Scores(float(right) / len(self.test), float(total) / len(self.test), f1)

    def describe_data(self) -> dict[str, Any]:
        """Return what was trained and tested on, in plain values."""
        return {
            "name": self.train.name,
            "builtin": self.train.builtin,
            "classes": self.train.classes,
            "score": self.score,
            "train": sum(len(part) for part in self.parts),
            "test": len(self.test),
            "test_from": self.test_from,
            "client_sizes": [len(part) for part in self.parts],
        }


def build_federation(settings: FederationSettings, dataset: Dataset | None = None, test: Dataset | None = None) -> Federation:
    """Load, deal out, build and check everything, before any training."""
    train, test, test_from = load_both(settings, dataset, test)
    defense = build_defense(settings.defense)
    parts = PARTITIONS.build(settings.partition).split(train, settings.clients, Seed(settings.seed).child("partition"))
    model = build_model(
        settings.model,
        input_shape=train.input_shape,
        classes=train.classes,
        seed=Seed(settings.seed).child("model"),
        weights=settings.weights or None,
        dense=train.dense,
    )
    adapted = adapt(defense, model)
    task_loss = loss_by_name(settings.loss)
    loss = adapted.adapt_loss(task_loss) if adapted.adapt_loss else task_loss
    device = _device(settings.device)
    tracked = tuple(tracked_buffers(adapted.model)) if settings.batch_norm == "train" else ()
    if settings.batch_norm == "train" and batch_norm_layers(adapted.model):
        _check_minibatches(settings, parts)
    return Federation(
        settings=settings,
        train=train,
        test=test,
        test_from=test_from,
        parts=tuple(tuple(part) for part in parts),
        defense=defense,
        learner=_learner(adapted, loss, settings.training(), train.input_shape).to(device),
        evaluator=_evaluator(adapted.model, loss).to(device),
        task_loss=task_loss,
        noise_shapes=dict(adapted.noise_shapes),
        spec=ModelSpec.of(adapted.model),
        tracked=tracked,
        inputs=train.inputs.to(device),
        targets=train.targets.to(device),
        public=public_images(train.input_shape, PUBLIC, Seed(settings.seed).child("public")).to(device),
    )


def _learner(adapted: AdaptedModel, loss: Loss, training: TrainingSettings, input_shape: tuple[int, ...]) -> Learner:
    """Return the clients' local training, with the shapes of what its model draws in one step for one example."""
    noise = {name: torch.zeros((1, 1, *shape)) for name, shape in adapted.noise_shapes.items()}
    learner = Learner.of(adapted.model, loss, training).replace(noise=noise)
    return with_dropout(learner, input_shape) if training.dropout else learner


def _device(name: str) -> torch.device:
    return torch.device(find_device(name))


def _evaluator(model: nn.Module, loss: Loss) -> Learner:
    """Return the model as torch evaluates it; it is never mapped, so BatchNorm may keep torch's own fast form."""
    structure = separate_layers(copy.deepcopy(model)).eval().requires_grad_(False)
    buffers = {name: value.detach().clone() for name, value in structure.named_buffers()}
    return Learner(structure, tensors.detach(dict(structure.named_parameters())), buffers, loss)


def _check_minibatches(settings: FederationSettings, parts: list[list[int]]) -> None:
    """Refuse batches of one record, which have no variance to normalise with."""
    small = next((client for client, part in enumerate(parts) if len(part) < 2), None)
    cure = "set batch_norm = 'eval', or use a model with GroupNorm"
    if small is not None:
        raise UsageError(f"client {small} has one record, and BatchNorm in train mode needs two; {cure}, or have fewer clients")
    if settings.minibatch == 1:
        raise UsageError(f"minibatch is 1, and BatchNorm in train mode needs at least two records; {cure}, or raise minibatch")


def load_both(settings: FederationSettings, dataset: Dataset | None, test: Dataset | None) -> tuple[Dataset, Dataset, str]:
    """Return training and test records, and where the latter come from: given, own split, held out."""
    if dataset is None:
        dataset = _load(settings)
        test = test or _own_test_split(settings, dataset)
        where = "own split"
    else:
        where = "given"
    if test is None:
        dataset, test = _hold_out(dataset, settings)
        where = "held out"
    if test.input_shape != dataset.input_shape:
        raise UsageError(f"test records have shape {test.input_shape}, training records {dataset.input_shape}; give like ones")
    if test.dense != dataset.dense:
        raise UsageError("training and test records must both have masks, or both have classes; give like ones")
    if test.classes > dataset.classes:
        raise UsageError(f"test records have {test.classes} classes, training records {dataset.classes}; give the same classes")
    return dataset, test, where


def _load(settings: FederationSettings, **more: Any) -> Dataset:
    return load_source(settings, **more)


def _own_test_split(settings: FederationSettings, dataset: Dataset) -> Dataset | None:
    """Return the data's own test split, or None where it has none."""
    if dataset.builtin or settings.labels or read_options(settings.read).get("split") == "test":
        return None
    try:
        return _load(settings, split="test", classes=dataset.classes)
    except UsageError:
        return None


def _hold_out(dataset: Dataset, settings: FederationSettings) -> tuple[Dataset, Dataset]:
    """Hold a random share of the records out, the same for every defense."""
    held = round(len(dataset) * settings.test_share)
    if not 0 < held < len(dataset):
        raise UsageError(f"test_share = {settings.test_share} of {len(dataset)} records leaves nothing to train or to test on")
    order = Seed(settings.seed).child("test").numpy("held out").permutation(len(dataset))
    test, train = sorted(int(row) for row in order[:held]), sorted(int(row) for row in order[held:])
    return dataset.take(train), dataclasses.replace(dataset.take(test), name=f"{dataset.name} (held out)")
