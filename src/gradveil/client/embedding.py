"""The honest party of vertical learning: its features in, its protected embedding out.

Every hook of its defense that has a place in vertical learning is called at its station.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.client.needs import unmet_need
from gradveil.defenses.base import HOOKS, ClientView, Defense, Need, State
from gradveil.defenses.chain import parts_of
from gradveil.errors import BadUpdate, UsageError
from gradveil.learning.embedding import EMBEDDING, EMBEDDING_GRADIENT, EmbeddingLearner
from gradveil.randomness import Seed
from gradveil.records import Batch, ModelSpec, Payload, Role, TensorSpec, Update
from gradveil.registry import spell
from gradveil.tensors import check_finite
from gradveil.wire.dense import decode_dense, encode_dense

__all__ = ["VERTICAL_HOOKS", "PartyResult", "check_vertical", "read_embedding", "run_party", "vertical_fault"]

VERTICAL_HOOKS = ("prepare", "protect_batch", "protect_embedding")
"""Hooks that have a place in vertical learning: no gradient and no update of weights leaves a party."""
PARTY_GIVES: tuple[Need, ...] = ("batch", "records", "public")
"""What a party has by itself: labels, and the loss they enter, are with the label owner."""


def vertical_fault(defense: Defense) -> str | None:
    """Return None where every part of a defense has something to do in vertical learning, else one sentence why not."""
    for part in parts_of(defense):
        stations = set(part.stations())
        if "adapt_model" in stations:
            return f"{spell(part)} changes the model that clients train together, and a party of vertical learning has its own"
        # A defense of which only a part would be applied is none.
        elsewhere = [hook for hook in HOOKS if hook in stations and hook not in VERTICAL_HOOKS]
        if elsewhere:
            return f"{spell(part)} acts at {' and '.join(elsewhere)}, and in vertical learning only embeddings leave a party"
    return unmet_need(defense, PARTY_GIVES, "which in vertical learning only the label owner has")


def check_vertical(defense: Defense) -> None:
    """Raise `UsageError` for a defense that would do nothing in vertical learning."""
    fault = vertical_fault(defense)
    if fault:
        raise UsageError(f"{fault}; use a defense of data or embeddings")


@dataclass(frozen=True)
class PartyResult:
    """What one party did for one batch.

    Attributes:
        payload: What crosses the wire: the embedding, and the gradient that came back where an attacker sees it too.
        state: What the defense keeps.
        trained_batch: The party's features after what the defense did to them.
        embedding: The embedding as sent.
    """

    payload: Payload
    state: State
    trained_batch: Batch
    embedding: Tensor


def run_party(
    learner: EmbeddingLearner,
    batch: Batch,
    defense: Defense,
    seed: Seed,
    *,
    state: State | None = None,
    round_index: int = 0,
    public: Tensor | None = None,
) -> PartyResult:
    """Embed a batch under a defense and encode what is sent.

    Args:
        learner: The party's bottom model; with a top model, the gradient of the embedding as sent is part of what is seen.
        batch: The party's own features; labels matter for that gradient only.
        defense: What protects them.
        seed: Root of this party's randomness; the same seed gives the same bits.
        state: What the defense kept from the last batch; None lets it prepare.
        round_index: Step of training, or number of the prediction.
        public: Public inputs the defense may use.
    """
    view = ClientView(
        learner=learner, seed=seed, round=round_index, weights=learner.weights, raw_batch=batch, batch=batch, public=public
    )
    state = defense.prepare(batch, view) if state is None else state
    trained, state = defense.protect_batch(batch, view, state)
    view = view.replace(batch=trained)
    embedding = learner.embed(trained.inputs).detach()
    check_finite({EMBEDDING: embedding}, "the party's embedding")
    sent, state = defense.protect_embedding(embedding, view, state)
    if sent.shape != embedding.shape:
        raise BadUpdate(f"the defense changed the embedding's shape from {tuple(embedding.shape)} to {tuple(sent.shape)}")
    seen = {EMBEDDING: sent.detach()}
    check_finite(seen, "the defended embedding")
    if learner.top is not None:
        top = learner.top
        seen[EMBEDDING_GRADIENT] = torch.func.grad(lambda e: top.objective(top.weights, e, batch.targets))(seen[EMBEDDING])
    payload = encode_dense(Update(weights=seen, examples=len(batch), round=round_index))
    return PartyResult(payload, state, trained, seen[EMBEDDING])


def read_embedding(payload: Payload, learner: EmbeddingLearner, input_shape: tuple[int, ...]) -> Update:
    """Return what the receiver reads, after checking names, shapes and values; or raise `BadUpdate`."""
    reference = next(iter(learner.weights.values()))
    with torch.no_grad():
        expected = learner.embed(torch.zeros((payload.examples, *input_shape), dtype=reference.dtype, device=reference.device))
    spec = TensorSpec(tuple(expected.shape), expected.dtype, Role.WEIGHT)
    names = (EMBEDDING,) if learner.top is None else (EMBEDDING, EMBEDDING_GRADIENT)
    return decode_dense(payload, ModelSpec(dict.fromkeys(names, spec)))
