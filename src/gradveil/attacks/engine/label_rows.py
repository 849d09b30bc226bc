"""What each class's row of the last layer looks like, and a model of which row is the label's, learned from simulated releases.

Classes are exchangeable up to the network's weights: what makes the label's row differ from the others is the same for every
class, once the usual look of each class's row is taken off. So one small model serves all classes, and few releases teach it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

__all__ = ["RowModel", "features_of_rows", "fit_counts", "fit_rows", "places_of", "standardised"]

RIDGE = 1.0
NEWTON_STEPS = 30
TEMPERATURES = tuple(0.05 * 1.2**power for power in range(17))  # up to 0.92
"""A model is never taken to be surer than it was fitted, only less sure."""
SUPPRESSED = 1e-9
ROUNDING = 1e-7
MOVED = 0.2
"""How much better rows must go with other classes, in correlation, on releases that had no part in assigning them."""


def standardised(values: Tensor) -> Tensor:
    """Return values (..., C) less their mean over classes, in their standard deviations; zero where all are equal."""
    values = values.nan_to_num(nan=0.0, posinf=1e30, neginf=-1e30).double()
    apart = values - values.mean(-1, keepdim=True)
    size = apart.abs().amax(-1, keepdim=True)
    apart = apart / torch.where(size > 0, size, 1.0)
    spread = apart.square().mean(-1, keepdim=True).sqrt()
    return torch.where(spread > SUPPRESSED, apart / spread.clamp_min(SUPPRESSED), torch.zeros_like(apart))


def features_of_rows(weight: Tensor, bias: Tensor | None, direction: Tensor, prediction: Tensor) -> Tensor:
    """Return (C, K) numbers that tell how each class's row of a release looks beside the other rows of the same release.

    Bias; sum of the row; the row along ``direction``, in which labels' rows stood out in simulation; their sizes; how many
    entries are zero; and how nearly the bias is orthogonal to p - e_c, as that of a projected gradient is.
    """
    weight = weight.double()
    bias = torch.zeros_like(weight[:, 0]) if bias is None else bias.double()
    along = weight @ direction
    # The label's is tiny if it is anything: its size must not vanish beside that of the others.
    angle = ((bias - (bias * prediction.double()).sum()).abs() + ROUNDING * bias.norm() + torch.finfo(bias.dtype).tiny).log()
    columns = [
        *(bias, weight.sum(1), along),
        *(bias.abs(), weight.norm(dim=1), along.abs()),
        *((bias == 0).double(), (weight == 0).double().mean(1), angle),
    ]
    return standardised(torch.stack(columns)).T


@dataclass(frozen=True)
class RowModel:
    """Conditional logit: ``P(label = c) = softmax_c(t w · (f_c - u_c))``; u_c are the features of class c where it is absent.

    Attributes:
        usual: (C, K).
        weights: (K,).
        temperature: t, at which held-out simulated releases were told best.
    """

    usual: Tensor
    weights: Tensor
    temperature: float

    def log_posterior(self, features: Tensor) -> Tensor:
        """Return (C,) log-probabilities from (C, K) features."""
        return (self.temperature * ((features - self.usual) @ self.weights)).log_softmax(0)


def fit_rows(features: Tensor, labels: Tensor, folds: Sequence[int]) -> RowModel:
    """Fit the model to simulated releases.

    Args:
        features: (N, C, K).
        labels: (N,) with what each was simulated.
        folds: (N,) which releases share a picture; each fold is held out once to find the temperature.
    """
    fold = torch.as_tensor(folds)
    groups = [fold % 2 == parity for parity in (0, 1)] if int(fold.max()) else []
    held: list[Tensor] = []
    for test in groups:
        usual = _usual(features[~test], labels[~test])
        weights = _logit(features[~test] - usual, labels[~test])
        scores = (features[test] - usual) @ weights
        held.append(torch.cat([scores, scores.gather(1, labels[test][:, None])], 1))
    usual = _usual(features, labels)
    weights = _logit(features - usual, labels)
    return RowModel(usual, weights, _temperature(torch.cat(held)) if held else 1.0)


def _usual(features: Tensor, labels: Tensor) -> Tensor:
    """Return the mean features of every class over the releases in which it is not the label."""
    absent = torch.ones_like(features[..., :1]).scatter(1, labels[:, None, None], 0)
    return (features * absent).sum(0) / absent.sum(0).clamp_min(1)


def _logit(features: Tensor, labels: Tensor) -> Tensor:
    """Maximise sum_n log softmax(f_n w)[y_n] - |w|²/2 by damped Newton steps; concave, so there is one maximum."""
    rows = torch.arange(len(labels))
    weights = features.new_zeros(features.shape[-1])

    def value(w: Tensor) -> Tensor:
        return (features @ w).log_softmax(1)[rows, labels].sum() - RIDGE * w.square().sum() / 2

    for _ in range(NEWTON_STEPS):
        likely = (features @ weights).softmax(1)  # (N, C)
        mean = torch.einsum("nc,nck->nk", likely, features)
        slope = (features[rows, labels] - mean).sum(0) - RIDGE * weights
        bend = torch.einsum("nc,nck,ncl->kl", likely, features, features) - mean.T @ mean
        step = torch.linalg.solve(bend + RIDGE * torch.eye(len(weights), dtype=weights.dtype, device=weights.device), slope)
        now, size = value(weights), 1.0
        while size > 1e-3 and not bool(value(weights + size * step) >= now):
            size /= 2
        weights = weights + size * step
        if float(step.abs().max()) * size < 1e-6:
            break
    return weights


def _temperature(held: Tensor) -> float:
    """Return the factor at which held-out scores (their last column the label's) tell labels best."""
    scores, own = held[:, :-1], held[:, -1]
    losses = {t: float((scores * t).logsumexp(1).sub(own * t).sum()) for t in (*TEMPERATURES, 1.0)}
    return min(losses, key=lambda t: losses[t])


def fit_counts(features: Tensor, counts: Tensor) -> tuple[Tensor, float]:
    """Fit how many examples of a class a batch holds to features of its row, by ridge regression over all classes and batches.

    Args:
        features: (N, C, K) of simulated releases.
        counts: (N, C) true counts.

    Returns:
        (K + 1,) coefficients, the constant last, and the standard deviation of what they leave on releases held out.
    """

    def design(x: Tensor) -> Tensor:
        return torch.cat([x.flatten(0, 1), torch.ones_like(x.flatten(0, 1)[:, :1])], 1)

    def solve(x: Tensor, y: Tensor) -> Tensor:
        matrix = design(x)
        penalty = RIDGE * torch.eye(matrix.shape[1], dtype=matrix.dtype, device=matrix.device)
        solved: Tensor = torch.linalg.solve(matrix.T @ matrix + penalty, matrix.T @ y.flatten())
        return solved

    odd, even = slice(1, None, 2), slice(0, None, 2)
    left = [
        design(features[test]) @ solve(features[kept], counts[kept]) - counts[test].flatten()
        for test, kept in ((odd, even), (even, odd))
    ]
    return solve(features, counts), float(torch.cat(left).square().mean().sqrt())


def places_of(looks: Tensor, counts: Tensor) -> Tensor:
    """Return (C,) the row that tells of each class: its own, unless releases show clearly that rows were moved.

    Rows are assigned so that what they look like goes with the counts of their classes, on half of the releases. That is believed
    where it holds on the other half, too, and clearly better than leaving every row where it is.

    Args:
        looks: (N, C) what each row of simulated releases looks like.
        counts: (N, C) true counts.
    """
    odd, classes = torch.arange(len(looks)) % 2 == 1, torch.arange(looks.shape[1])
    found = [torch.from_numpy(linear_sum_assignment(-_correlations(counts[h], looks[h]).numpy())[1]) for h in (odd, ~odd)]
    checked = [_correlations(counts[h], looks[h]) for h in (~odd, odd)]
    better = [each[classes, rows].mean() - each[classes, classes].mean() for each, rows in zip(checked, found, strict=True)]
    if min(better) <= MOVED:
        return classes
    return torch.from_numpy(linear_sum_assignment(-_correlations(counts, looks).numpy())[1])


def _correlations(left: Tensor, right: Tensor) -> Tensor:
    """Return (C, D) correlations of columns; of one that is constant, zero."""
    left, right = (each - each.mean(0) for each in (left, right))
    sizes = left.norm(dim=0)[:, None] * right.norm(dim=0)
    return torch.where(sizes > 0, left.T @ right / sizes.clamp_min(1e-300), 0.0)
