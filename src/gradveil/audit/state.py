"""The training state of an audited model: which records it was trained on, and whether those under attack are among them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradveil.data import Dataset
from gradveil.errors import UsageError
from gradveil.learning import Learner
from gradveil.learning.dropout import draw_masks
from gradveil.randomness import Seed
from gradveil.registry import parse_call
from gradveil.study.cell import Cell
from gradveil.tensors import Named

__all__ = ["CANDIDATES", "Seen", "bring_to_state", "order_of_records", "seen_by_model"]

CANDIDATES = 256
ENOUGH = 128
"""Records that a model can be trained on for a state to mean something; with fewer to spare, it is trained on all."""


@dataclass(frozen=True)
class Seen:
    """What the model was trained on before the updates under attack.

    Attributes:
        rows: Rows of the data; empty where it was not trained here.
        attacked: Whether records under attack are among them.
        sentence: What to say about it; empty for a new model.
    """

    rows: tuple[int, ...] = ()
    attacked: bool = False
    sentence: str = ""


def order_of_records(cell: Cell, dataset: Dataset) -> list[int]:
    """Return all rows in the order of a cell: those under attack, then those that complete the candidates, then all others."""
    order: list[int] = Seed(cell.seed).child("records").numpy("choice").permutation(len(dataset)).tolist()
    return order


def seen_by_model(cell: Cell, dataset: Dataset) -> Seen:
    """Return what the model of a cell was trained on: others than the records under attack, wherever there are enough of them.

    Where there are enough beside all candidates, it is none of these either: else the records under attack would stand out among
    the candidates as the only ones that the model has not seen.
    """
    name, _ = parse_call(cell.state)
    if name == "given":
        return Seen(sentence="Whether the given weights have seen the records under attack is not known.")
    if name != "trained":
        return Seen()
    order, wanted = order_of_records(cell, dataset), cell.targets * cell.batch_size * cell.clients
    for first, told in (
        (max(CANDIDATES, wanted), "none of them under attack or among the candidates"),
        (wanted, "none of them under attack; the other candidates are among them"),
    ):
        if len(order) - first >= ENOUGH:
            rows = tuple(order[first:])
            return Seen(rows, sentence=f"The model was trained on {len(rows)} records, {told}.")
    sentence = (
        f"The model was trained on all {len(order)} records, those under attack included: there are too few to hold them out."
    )
    return Seen(tuple(order), attacked=True, sentence=sentence)


def bring_to_state(learner: Learner, dataset: Dataset, cell: Cell) -> Learner:
    """Bring the model to the training state the cell asks for."""
    name, settings = parse_call(cell.state)
    if name in ("untrained", "given"):
        return learner
    if name != "trained" or set(settings) - {"steps", "learning_rate", "batch"}:
        raise UsageError(f"training state {cell.state!r} is unknown; write untrained, given, or trained(steps=200)")
    steps, rate, size = int(settings.get("steps", 200)), float(settings.get("learning_rate", 0.1)), int(settings.get("batch", 32))
    rows = torch.tensor(seen_by_model(cell, dataset).rows)
    generator = Seed(cell.seed).child("training").generator("batches")
    drawn = Seed(cell.seed).child("training").generator("model noise", device=cell.device)
    weights = learner.weights
    for _ in range(steps):
        chosen = rows[torch.randint(len(rows), (min(size, len(rows)),), generator=generator)]
        inputs, targets = dataset.inputs[chosen].to(cell.device), dataset.targets[chosen].to(cell.device)
        gradient = learner.gradient(weights, inputs, targets, _noise(learner, len(chosen), drawn))
        weights = {n: w - rate * gradient[n] for n, w in weights.items()}
    return learner.replace(weights={n: w.detach() for n, w in weights.items()})


def _noise(learner: Learner, count: int, generator: torch.Generator) -> Named:
    """Draw what the model draws in one step: masks of its dropout layers where they are on, and an adapted model's noise."""
    empty = learner.zero_noise(count)
    masks = draw_masks(learner.replace(noise=empty), generator)
    others = {n: v for n, v in empty.items() if n not in masks}
    return masks | {n: torch.randn(v.shape, generator=generator, device=v.device, dtype=v.dtype) for n, v in others.items()}
