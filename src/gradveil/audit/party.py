"""The party of vertical learning that a cell attacks: its part of every record, and its bottom model in the training state."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradveil.client.embedding import check_vertical
from gradveil.data import DIVISIONS, Dataset, Division, part_of
from gradveil.defenses import Defense
from gradveil.errors import UsageError
from gradveil.federation.parties import build_parties
from gradveil.learning import EmbeddingLearner, Learner, loss_by_name
from gradveil.randomness import Seed
from gradveil.study.cell import Cell

__all__ = ["build_party", "division_of", "own_data", "own_part"]


def division_of(cell: Cell) -> Division:
    """Return who owns which features in a cell."""
    found: Division = DIVISIONS.build(cell.parts)
    return found


def own_part(cell: Cell, inputs: Tensor) -> Tensor:
    """Return what the attacked party has of whole inputs (B, ...); all of it where no model is cut."""
    return division_of(cell).split(inputs)[cell.party].contiguous() if cell.cut else inputs


def own_data(cell: Cell, dataset: Dataset) -> Dataset:
    """Return what the attacked party has of every record."""
    return part_of(dataset, division_of(cell), cell.party) if cell.cut else dataset


def build_party(cell: Cell, dataset: Dataset, defense: Defense, train: Callable[[Learner], Learner]) -> EmbeddingLearner:
    """Build the bottom model of the attacked party, after all parties were trained together.

    Args:
        cell: The settings.
        dataset: Whole records.
        defense: What the parties run.
        train: Brings a learner of the joined model to the training state of the cell.
    """
    check_vertical(defense)
    if dataset.dense:
        raise UsageError(f"{dataset.name!r} has masks, and vertical learning here is for classes; leave cut out")
    division = division_of(cell)
    parties = len(division.places(dataset.input_shape))
    if cell.party >= parties:
        raise UsageError(f"there is no party {cell.party}; {cell.parts} divides the features among parties 0 to {parties - 1}")
    if cell.sees == "embedding_gradient" and parties > 1:
        raise UsageError(
            "the gradient of one party's embedding depends on the embeddings of the others, which no attack here fits together; "
            "set parts = 'whole', or sees = 'embedding'"
        )
    joined = build_parties(
        cell.model,
        cell.cut,
        division,
        input_shape=dataset.input_shape,
        classes=dataset.classes,
        seed=Seed(cell.seed).child("model"),
        weights=cell.weights or None,
    )
    loss, settings = loss_by_name(cell.loss), cell.training()
    trained = train(Learner.of(joined, loss, settings).to(torch.device(cell.device)))
    joined.load_state_dict({name: value.cpu() for name, value in trained.weights.items()}, strict=False)
    top = joined.top if cell.sees == "embedding_gradient" else None
    bottom = joined.bottoms[cell.party]
    return EmbeddingLearner.of_bottom(bottom, loss, settings, top=top).to(torch.device(cell.device))
