"""A client sends its update, or a party its embedding, and the receiver reads it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradveil.client.embedding import read_embedding, run_party
from gradveil.client.local_training import LocalTraining
from gradveil.client.update import defend, run_client
from gradveil.defenses.base import Defense, State
from gradveil.learning.embedding import EmbeddingLearner
from gradveil.learning.learner import Learner
from gradveil.randomness import Seed
from gradveil.records import Batch, ModelSpec, Payload, Update
from gradveil.tensors import Named

__all__ = ["Sent", "arrives", "send"]


@dataclass(frozen=True)
class Sent:
    """What one client or party sent, and what the receiver reads from it.

    Attributes:
        payload: What crossed the wire.
        update: As decoded and checked.
        state: What the defense keeps.
        trained_batch: The data after what the defense did to them.
    """

    payload: Payload
    update: Update
    state: State
    trained_batch: Batch


def send(
    learner: Learner,
    batch: Batch,
    defense: Defense,
    seed: Seed,
    *,
    state: State | None = None,
    round_index: int = 0,
    public: Tensor | None = None,
) -> Sent:
    """Let a client send its update, or a party its embedding, whichever the learner is for, and read it as the receiver does."""
    if isinstance(learner, EmbeddingLearner):
        own = run_party(learner, batch, defense, seed, state=state, round_index=round_index, public=public)
        read = read_embedding(own.payload, learner, tuple(batch.inputs.shape[1:]))
        return Sent(own.payload, read, own.state, own.trained_batch)
    # Running statistics travel with the update where the learner was given any to move.
    local = LocalTraining(buffers=learner.running) if learner.running else None
    result = run_client(learner, batch, defense, seed, state=state, round_index=round_index, public=public, local=local)
    read = defense.decode(result.payload, ModelSpec.of(learner.model).joined(learner.running))
    return Sent(result.payload, read, result.state, result.trained_batch)


def arrives(
    learner: Learner,
    batch: Batch,
    defense: Defense,
    seed: Seed,
    *,
    state: State | None = None,
    round_index: int = 0,
    public: Tensor | None = None,
    raw: Named | None = None,
) -> tuple[Named, State]:
    """Return the weights that the receiver reads, and what the defense keeps, by nothing but arithmetic where that is possible.

    The wire is left out where encoding changes no value, and running statistics, which no weight depends on; so that many clients
    can run at once under ``torch.func.vmap``, where the defense allows it.
    """
    if isinstance(learner, EmbeddingLearner):
        sent = send(learner, batch, defense, seed, state=state, round_index=round_index, public=public)
        return sent.update.weights, sent.state
    made = defend(learner, batch, defense, seed, state=state, round_index=round_index, public=public, raw=raw)
    return defense.as_read(made.update, made.view).weights, made.state
