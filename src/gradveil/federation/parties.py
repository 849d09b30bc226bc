"""The parties of vertical learning: bottom models on their own features, one top model on the joined embeddings.

`build_parties` cuts a model into bottoms and top; what one party does is `gradveil.client.embedding`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gradveil.data.divisions import Division
from gradveil.errors import UsageError
from gradveil.models.base import build_model, sealed_randomness
from gradveil.models.split import split_model, widen_first_linear
from gradveil.randomness import Seed

__all__ = ["JoinedModel", "build_parties"]


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
