"""The parties of vertical learning: bottom models on their own features, one top model on the joined embeddings.

`build_parties` cuts a model into bottoms and top; `run_party` is the honest party: its features in, its protected embedding out,
every hook of its defense that has a place in vertical learning called at its station.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradveil.data.vertical import Division
from gradveil.defenses.base import HOOKS, ClientView, Defense, State
from gradveil.defenses.chain import parts_of
from gradveil.errors import BadUpdate, UsageError
from gradveil.federation.client import run_client
from gradveil.federation.local_training import LocalTraining
from gradveil.learning.embedding import EMBEDDING, EMBEDDING_GRADIENT, EmbeddingLearner
from gradveil.learning.learner import Learner
from gradveil.models.base import build_model, sealed_randomness
from gradveil.models.split import split_model, widen_first_linear
from gradveil.randomness import Seed
from gradveil.records import Batch, ModelSpec, Payload, Role, TensorSpec, Update
from gradveil.registry import spell
from gradveil.tensors import check_finite
from gradveil.wire.dense import decode_dense, encode_dense

__all__ = [
    "VERTICAL_HOOKS",
    "JoinedModel",
    "PartyResult",
    "Sent",
    "build_parties",
    "check_vertical",
    "read_embedding",
    "run_party",
    "send",
    "vertical_fault",
]

VERTICAL_HOOKS = ("prepare", "protect_batch", "protect_embedding")
"""Hooks that have a place in vertical learning: no gradient and no update of weights leaves a party."""


class JoinedModel(nn.Module):
    """All parties as one model: divide the input, embed each part, join the embeddings, classify.

    It is what training the parties trains, and what centralised training of the same architecture would train.

    Attributes:
        bottoms: One bottom model per party.
        top: The label owner's model.
        division: Who owns which features.
    """

    def __init__(self, bottoms: Sequence[nn.Module], top: nn.Module, division: Division) -> None:
        """Hold the models; nothing is copied."""
        super().__init__()
        self.bottoms = nn.ModuleList(bottoms)
        self.top = top
        self.division = division

    def embed(self, inputs: Tensor) -> list[Tensor]:
        """Return every party's embedding of inputs (B, ...)."""
        parts = self.division.split(inputs)
        return [bottom(part) for bottom, part in zip(self.bottoms, parts, strict=True)]

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (B, classes)."""
        logits: Tensor = self.top(join_embeddings(self.embed(inputs), self.division))
        return logits


def join_embeddings(embeddings: Sequence[Tensor], division: Division) -> Tensor:
    """Put embeddings together: maps with places along the axis that was divided, flat ones (B, features) side by side."""
    return torch.cat(list(embeddings), dim=_join_axis(embeddings[0], division))


def _join_axis(embedding: Tensor, division: Division) -> int:
    return 1 if embedding.ndim == 2 else embedding.ndim + division.axis


def share_of(joined: Tensor, embeddings: Sequence[Tensor], division: Division) -> list[Tensor]:
    """Return the share of each party in a tensor shaped like the joined embedding: the inverse of `join_embeddings`."""
    axis = _join_axis(embeddings[0], division)
    return list(joined.split([embedding.shape[axis] for embedding in embeddings], dim=axis))


def build_parties(
    spelling: str,
    cut: str,
    division: Division,
    *,
    input_shape: tuple[int, ...],
    classes: int,
    seed: Seed,
    weights: str | None = None,
) -> JoinedModel:
    """Build bottoms and top of a model, checked by a probe, in eval mode.

    Every party's bottom is the model's bottom for the shape of its part. The first party starts from the very weights the whole
    model has for this seed, the others from their own. Where flat embeddings are joined, the first layer of the top is made
    anew, wide enough.

    Args:
        spelling: As in `gradveil.models.build_model`.
        cut: As in `gradveil.models.split_model`.
        division: Who owns which features.
        input_shape: Shape of one whole input.
        classes: Number of outputs.
        seed: Decides the first weights.
        weights: File with weights of the whole model; every party then starts from them.
    """
    whole = build_model(spelling, input_shape=input_shape, classes=classes, seed=seed, weights=weights)
    first, top = split_model(whole, cut)
    shapes = division.shapes(input_shape)
    if len(shapes) == 1:
        return JoinedModel([first], top, division).eval()
    bottoms = []
    for party, shape in enumerate(shapes):
        own = build_model(spelling, input_shape=shape, classes=classes, seed=seed.child("party", party) if party else seed)
        bottom = split_model(own, cut)[0]
        bottoms.append(_with_weights(bottom, first, weights) if weights else bottom)
    joined = JoinedModel(bottoms, top, division).eval()
    with torch.no_grad():
        embeddings = joined.embed(torch.zeros((2, *input_shape)))
        if embeddings[0].ndim == 2:
            if weights:
                raise UsageError(f"weights of the whole model do not fit the joined embeddings at {cut!r}; train the parties")
            with sealed_randomness(seed.number("joined top")):
                widen_first_linear(top, len(shapes))
        _check_joined(joined, embeddings, cut, classes)
    return joined


def _with_weights(bottom: nn.Module, whole: nn.Module, file: str) -> nn.Module:
    """Give a party the bottom weights of the whole model, where its part of the input allows."""
    given = whole.state_dict()
    if any(given[name].shape != value.shape for name, value in bottom.state_dict().items()):
        raise UsageError(f"the weights {file!r} do not fit a part of the input; use parts = 'whole', or train the parties")
    bottom.load_state_dict(given)
    return bottom


def _check_joined(joined: JoinedModel, embeddings: list[Tensor], cut: str, classes: int) -> None:
    shape = "unknown"
    try:
        together = join_embeddings(embeddings, joined.division)
        shape = str(tuple(together.shape[1:]))
        logits = joined.top(together)
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            f"the embeddings of the parts, joined to shape {shape}, do not fit the top model at {cut!r}; choose another cut, or "
            "parts whose sizes the model's strides divide"
        ) from error
    if tuple(logits.shape) != (2, classes):
        raise UsageError(f"the top model at {cut!r} gives shape {tuple(logits.shape)} for 2 records, expected (2, {classes})")


def vertical_fault(defense: Defense) -> str | None:
    """Return None where every part of a defense has something to do in vertical learning, else one sentence why not."""
    for part in parts_of(defense):
        stations = set(part.stations())
        if part.needs_training_loss:
            return f"{spell(part)} needs the training loss, which a party of vertical learning does not have by itself"
        if part.needs_labels:
            return f"{spell(part)} looks at labels, which in vertical learning only the label owner has"
        if "adapt_model" in stations:
            return f"{spell(part)} changes the model that clients train together, and a party of vertical learning has its own"
        # A defense of which only a part would be applied is none.
        elsewhere = [hook for hook in HOOKS if hook in stations and hook not in VERTICAL_HOOKS]
        if elsewhere:
            return f"{spell(part)} acts at {' and '.join(elsewhere)}, and in vertical learning only embeddings leave a party"
    return None


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
