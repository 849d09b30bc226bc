"""Ridge regression from what was sent to what it was made of, through the Gram matrix of the examples alone.

``x = mu + k(g) (K + lambda I)^-1 (X - mu)``, with K the Gram matrix of centred features and k(g) the inner products of a new one
with them. For Gaussian x and g = A x + noise this is the posterior mean, as the examples tell mean and covariances;
nothing here assumes either.

How features are weighed (`WEIGHINGS`) and how strong the ridge is (`STRENGTHS`) are chosen together, by the error on examples
that were left out, fold by fold.

Letters: N examples, D features, M output values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.errors import UsageError

__all__ = ["STRENGTHS", "WEIGHINGS", "Regression", "fit_regression", "held_out_errors"]

WEIGHINGS = ("values", "tensors", "entries")
"""Features as they are; every tensor with the same energy; every entry with the same variance."""
STRENGTHS = tuple(10 ** (half / 2) for half in range(-16, 9))
"""Of the ridge, over the mean eigenvalue of the Gram matrix."""
QUIET = 0.01
"""Deviation of an entry, over that of its tensor, below which it is not made louder: what hardly moves is mostly rounding."""
COLUMNS = 4096
TINY = 1e-300


@dataclass(frozen=True, eq=False)
class Regression:
    """What was learned from N examples.

    Attributes:
        mean: (M,) of the outputs.
        centre: (D,) mean features.
        scale: (D,) by which centred features are multiplied.
        examples: (N, D) centred and scaled features.
        dual: (N, M) weights of the examples.
        weighing: Which of `WEIGHINGS` was chosen.
        strength: Which of `STRENGTHS`.
        error: Mean squared error of an output value on examples left out.
        spread: The same of who answers with the mean of the others.
    """

    mean: Tensor
    centre: Tensor
    scale: Tensor
    examples: Tensor
    dual: Tensor
    weighing: str
    strength: float
    error: float
    spread: float

    @property
    def entries(self) -> int:
        """Numbers that are held."""
        return self.examples.numel() + self.dual.numel()

    def predict(self, features: Tensor) -> Tensor:
        """Return (T, M) outputs for features (T, D), in double precision."""
        similar = self.dual.new_zeros((len(features), len(self.examples)))
        for start in range(0, features.shape[1], COLUMNS):
            part = slice(start, start + COLUMNS)
            apart = (features[:, part].double() - self.centre[part]) * self.scale[part]
            similar += apart @ self.examples[:, part].double().T
        return self.mean + similar @ self.dual


def fit_regression(features: Tensor, outputs: Tensor, folds: Tensor, parts: Sequence[slice]) -> Regression:
    """Learn outputs from features; one choice of weighing and strength, by the error on folds left out.

    Args:
        features: (N, D).
        outputs: (N, M).
        folds: (N,) of each example; examples that belong together (draws of one input) have the same.
        parts: Where the features of each tensor stand.
    """
    if len(folds.unique()) < 2:
        raise UsageError(f"{len(features)} public records teach no regression; give at least a few dozen")
    outputs = outputs.double()
    mean, centre = outputs.mean(0), features.mean(0, dtype=torch.float64)
    apart = outputs - mean
    scales = _scales(features, centre, parts)
    grams = {name: _gram(features, centre, scale) for name, scale in scales.items()}
    outer = apart @ apart.T / outputs.shape[1]
    errors = torch.stack([held_out_errors(grams[name], outer, folds) for name in WEIGHINGS])
    best = int(errors.argmin())
    weighing, strength = WEIGHINGS[best // len(STRENGTHS)], STRENGTHS[best % len(STRENGTHS)]
    gram, scale = grams[weighing], scales[weighing]
    dual = torch.linalg.solve(_ridged(gram, strength), apart)
    kept = ((features.double() - centre) * scale).to(features.dtype)
    error = float(errors.flatten()[best])
    return Regression(mean, centre, scale, kept, dual, weighing, strength, error, float(_spread(outer, folds)))


def held_out_errors(gram: Tensor, outer: Tensor, folds: Tensor, strengths: Sequence[float] = STRENGTHS) -> Tensor:
    """Return, per strength, the mean squared error of predicting each fold from all others.

    No output is needed but the inner products of all pairs: an answer is a sum of examples, ``x = sum_j a_j x_j``, whose weights
    add up to one.

    Args:
        gram: (N, N) inner products of features, about any origin.
        outer: (N, N) inner products of outputs about any origin, over their number M.
        folds: (N,).
        strengths: Over the mean eigenvalue of the whole centred Gram matrix.
    """
    unit = _unit(gram)
    total = gram.new_zeros(len(strengths))
    for fold in folds.unique():
        held, kept = (folds == fold).nonzero()[:, 0], (folds != fold).nonzero()[:, 0]
        inner, across = gram[kept][:, kept], gram[held][:, kept]
        middle = inner.mean(0)
        inner = inner - middle - middle[:, None] + middle.mean()
        across = across - across.mean(1, keepdim=True) - middle + middle.mean()
        values, basis = torch.linalg.eigh(inner)
        along = across @ basis
        # Weights of an answer: 1/n for every example, and what the ridge adds, w = along / (values + lambda) in this basis.
        of_mean = outer[kept][:, kept].mean(1)
        fixed = outer[held, held] - 2 * outer[held][:, kept].mean(1) + of_mean.mean()
        linear = (outer[held][:, kept] - of_mean) @ basis
        square = basis.T @ outer[kept][:, kept] @ basis
        for place, strength in enumerate(strengths):
            weights = along / (values.clamp_min(0) + strength * unit)
            total[place] += (fixed - 2 * (weights * linear).sum(1) + ((weights @ square) * weights).sum(1)).sum()
    return total / len(folds)


def _spread(outer: Tensor, folds: Tensor) -> Tensor:
    """Return the mean squared error of the mean of all other folds."""
    return held_out_errors(torch.zeros_like(outer), outer, folds, (1.0,))[0]


def _unit(gram: Tensor) -> Tensor:
    """Return the mean eigenvalue of the centred Gram matrix."""
    return ((gram.diagonal().mean() - gram.mean()) * len(gram) / max(1, len(gram) - 1)).clamp_min(TINY)


def _ridged(gram: Tensor, strength: float) -> Tensor:
    return gram + strength * _unit(gram) * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)


def _scales(features: Tensor, centre: Tensor, parts: Sequence[slice]) -> dict[str, Tensor]:
    """Return (D,) per weighing; what never moves counts nothing."""
    variance = torch.cat(
        [
            (features[:, start : start + COLUMNS].double() - centre[start : start + COLUMNS]).square().mean(0)
            for start in range(0, features.shape[1], COLUMNS)
        ]
    )
    tensors, entries = torch.zeros_like(variance), torch.zeros_like(variance)
    for part in parts:
        energy = variance[part].sum()
        if energy > TINY:
            tensors[part] = energy.rsqrt()
            entries[part] = (variance[part] + QUIET**2 * variance[part].mean()).rsqrt()
    return {"values": torch.ones_like(variance), "tensors": tensors, "entries": entries}


def _gram(features: Tensor, centre: Tensor, scale: Tensor) -> Tensor:
    """Return (N, N) inner products of centred and scaled features, in double precision, a few columns at a time."""
    total = centre.new_zeros((len(features), len(features)))
    for start in range(0, features.shape[1], COLUMNS):
        part = slice(start, start + COLUMNS)
        block = (features[:, part].double() - centre[part]) * scale[part]
        total += block @ block.T
    return total
