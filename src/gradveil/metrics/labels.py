"""Label accuracy: how many of a batch's labels were recovered, one value per record."""

from __future__ import annotations

from torch import Tensor

from gradveil.errors import UsageError

__all__ = ["label_hits"]


def label_hits(recovered: Tensor, true: Tensor, order: Tensor | None = None) -> Tensor:
    r"""Return 1 for each record whose label is covered by the recovered labels, else 0.

    Attacks on a batch recover a *multiset* of labels: the update does not say which record has which. So the sum over the batch
    is the size of the overlap of the two multisets, :math:`\sum_c \min(n_c, \hat n_c)`. Where a class was recovered too few
    times, the credit goes first to records whose assigned reconstruction carries the label, then to the others in order.

    Args:
        recovered: (B,) class indices, or (B, C) soft targets, of which the largest counts.
        true: (B,) or (B, C) likewise.
        order: (B,) from `gradveil.metrics.matching.assign`; as given by default.

    Returns:
        (B,) of 0 and 1 in double precision, in the order of ``true``.

    Example:
        >>> import torch
        >>> label_hits(torch.tensor([1, 1, 2]), torch.tensor([2, 1, 0])).tolist()
        [1.0, 1.0, 0.0]
    """
    guess, truth = _classes(recovered, "recovered"), _classes(true, "true")
    if guess.shape != truth.shape:
        raise UsageError(f"{len(guess)} recovered labels cannot be compared with {len(truth)} true ones")
    if order is not None:
        guess = guess[order]
    hits = guess == truth
    for label in truth.unique():
        owners = truth == label
        spare = min(int((guess == label).sum()), int(owners.sum())) - int((hits & owners).sum())
        waiting = (owners & ~hits).nonzero().flatten()
        hits[waiting[:spare]] = True
    return hits.double()


def _classes(labels: Tensor, name: str) -> Tensor:
    """Return class indices (B,), on the CPU, of hard or soft labels."""
    if labels.ndim == 2 and labels.is_floating_point():
        labels = labels.argmax(dim=1)
    if labels.ndim != 1 or labels.is_floating_point():
        raise UsageError(
            f"the {name} labels have shape {tuple(labels.shape)} and type {labels.dtype}; give (B,) classes or (B, C) scores"
        )
    return labels.detach().cpu()
