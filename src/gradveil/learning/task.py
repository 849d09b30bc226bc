"""How good the trained model is, where accuracy says little: F1 for two classes, Dice for masks."""

from __future__ import annotations

import torch
from torch import Tensor

from gradveil.errors import UsageError

__all__ = ["dice", "f1_score"]


def f1_score(predicted: Tensor, true: Tensor, positive: int = 1) -> float:
    """Return the harmonic mean of precision and recall of one class, 2 TP / (2 TP + FP + FN).

    Unlike accuracy it is not high for a model that always says the commoner class, unless that is the positive one.

    Args:
        predicted: (N,) class numbers.
        true: (N,) class numbers.
        positive: The class that is looked for; the other one is everything else.

    Returns:
        In [0, 1]; 0 where the class is neither there nor predicted, as scikit-learn has it.

    Example:
        >>> f1_score(torch.tensor([1, 1, 0, 0]), torch.tensor([1, 0, 1, 0]))
        0.5
    """
    if predicted.shape != true.shape or predicted.ndim != 1 or len(true) == 0:
        shapes = f"{tuple(predicted.shape)} and {tuple(true.shape)}"
        raise UsageError(f"F1 compares one predicted with one true class per record, not shapes {shapes}")
    said, there = predicted == positive, true == positive
    hits, wrong = int((said & there).sum()), int((said != there).sum())
    return 2 * hits / (2 * hits + wrong) if hits else 0.0


def dice(predicted: Tensor, true: Tensor) -> Tensor:
    r"""Return :math:`2 |A \cap B| / (|A| + |B|)` of each pair of masks; two empty masks agree, so they score 1.

    Args:
        predicted: (N, ...) of 0 and 1, or of truth values.
        true: Same shape.

    Returns:
        (N,) in [0, 1], double precision.

    Example:
        >>> dice(torch.tensor([[1, 1, 0, 0]]), torch.tensor([[1, 0, 0, 0]])).tolist()
        [0.6666666666666666]
    """
    if predicted.shape != true.shape or predicted.ndim < 2 or predicted.numel() == 0:
        raise UsageError(f"Dice compares masks (N, ...) of one shape, not {tuple(predicted.shape)} and {tuple(true.shape)}")
    left, right = predicted.bool().flatten(1), true.bool().flatten(1)
    both = (left & right).sum(1).double()
    total = (left.sum(1) + right.sum(1)).double()
    return torch.where(total > 0, 2 * both / total.clamp_min(1), torch.ones_like(total))
