"""A train function that carries out every defense: local training is ours, the model, the loss and the data the app's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message
from torch import Tensor, nn

from gradveil.client.local_training import LocalTraining, tracked_buffers
from gradveil.client.needs import unmet_need
from gradveil.client.update import ClientResult, horizontal_fault, run_client
from gradveil.defenses.base import NEEDS, Defense, State
from gradveil.defenses.chain import adapt, build_defense
from gradveil.errors import UsageError
from gradveil.flower.layout import Layout
from gradveil.flower.node import Asked, node_of
from gradveil.flower.protecting import check_buffers
from gradveil.learning.dropout import with_dropout
from gradveil.learning.learner import Learner
from gradveil.learning.losses import Loss, loss_by_name
from gradveil.randomness import Seed
from gradveil.records import Batch
from gradveil.study.local_training import TrainingSettings

__all__ = ["train"]

Data = Callable[[Context], Batch | Iterable[tuple[Tensor, Tensor]]]
PROXIMAL = "proximal-mu"


def train(
    model: nn.Module,
    defense: str | Defense,
    data: Data,
    *,
    loss: str | Loss = "cross_entropy",
    settings: TrainingSettings | None = None,
    public: Tensor | None = None,
    folder: Path | str | None = None,
    most: int = 0,
    buffers: bool | None = None,
    seed: int | None = None,
) -> Callable[[Message, Context], Message]:
    """Return a train function for ``app.train()(...)`` in which the defense has its say at every station.

    Args:
        model: The app's model, not adapted; its weights do not matter.
        defense: What protects the client.
        data: Returns this node's records: a `Batch`, with ids where the defense needs them, or pairs of inputs in [0, 1] and
            targets, as a data loader gives them.
        loss: Name of a loss, or a function of outputs and targets.
        settings: Local training; None is one epoch in minibatches of 32 at a learning rate of 0.01.
        public: Public inputs that the defense may use.
        folder: As for `protect`.
        most: As for `protect`.
        buffers: As for `protect`.
        seed: As for `protect`.

    Raises:
        UsageError: The defense cannot act here, or needs public inputs that are not given.
    """
    built = build_defense(defense) if isinstance(defense, str) else defense
    given = NEEDS.keys() - ({"public"} if public is None else set())
    fault = horizontal_fault(built) or unmet_need(built, given, "and there are none; give them as `public`")
    if fault:
        raise UsageError(fault)
    settings = settings or TrainingSettings(shares="weights", epochs=1, minibatch=32)
    adapted, plain = adapt(built, model), loss_by_name(loss) if isinstance(loss, str) else loss
    layout = Layout.of(adapted.model)
    check_buffers(layout, buffers)
    own = Learner.of(adapted.model, adapted.adapt_loss(plain) if adapted.adapt_loss else plain, settings)
    own = own.replace(noise={name: torch.zeros((1, 1, *shape)) for name, shape in adapted.noise_shapes.items()})
    tracked = tracked_buffers(adapted.model) if buffers and settings.batch_norm == "train" else []
    node = node_of(layout, folder, most, seed)

    def answer(message: Message, context: Context) -> Message:
        def work(asked: Asked, state: State | None, seed: Seed) -> ClientResult:
            if asked.config.get(PROXIMAL):
                raise UsageError(f"this train function has no proximal term, and the server asks for one ({PROXIMAL!r})")
            batch = _batch(data(context))
            return run_client(
                _learner(own, asked, batch),
                batch,
                built,
                seed,
                state=state,
                round_index=asked.round_index,
                public=public,
                local=LocalTraining(buffers={name: asked.buffers[name] for name in tracked}),
            )

        return node.answer(message, context, work)

    return answer


def _batch(found: Batch | Iterable[Any]) -> Batch:
    if isinstance(found, Batch):
        return found
    pairs = [(inputs, targets) for inputs, targets in found]
    if not pairs:
        raise UsageError("this node has no records to train on")
    return Batch(torch.cat([inputs for inputs, _ in pairs]), torch.cat([targets for _, targets in pairs]))


def _learner(own: Learner, asked: Asked, batch: Batch) -> Learner:
    """Return the learner at the global model, with the shapes of the noise its model draws; only the shape is read."""
    learner = own.replace(weights=asked.weights, buffers={**own.buffers, **asked.buffers})
    if own.settings.dropout:
        learner = with_dropout(learner, tuple(batch.inputs.shape[1:]))
    shape, blank = (own.settings.steps(len(batch)), len(batch)), next(iter(asked.weights.values())).new_zeros(())
    return learner.replace(noise={name: blank.expand(*shape, *value.shape[2:]) for name, value in learner.noise.items()})
