"""Cutting all weights of a model into slices of equal sensitivity to the inputs, as GradDefense does."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from gradveil.learning.learner import Learner
from gradveil.randomness import Seed
from gradveil.tensors import Named

__all__ = ["cut_slices", "layer_sensitivity", "root_inputs", "slice_of_entries"]

ROOT_SIZE = 8
"""Inputs of the root set; of public data handed in, so many are used."""


def root_inputs(shape: tuple[int, ...], public: Tensor | None = None) -> Tensor:
    """Return the root set: the first public inputs, or uniform noise that is the same for everybody.

    It decides only where slices begin and end, not which of them get noise, so it need not be secret.
    """
    if public is not None and len(public) and tuple(public.shape[1:]) == tuple(shape):
        return public[:ROOT_SIZE]
    return torch.rand((ROOT_SIZE, *shape), generator=Seed(0).generator("graddefense root set"))


def layer_sensitivity(learner: Learner, root: Tensor) -> dict[str, float]:
    """Return, per tensor, the mean over the root set of ‖d(Σ g) / dx‖, with g the tensor's gradient.

    One pass computes all gradients with their graph, and one more backward pass per tensor differentiates its sum. Classes are
    taken in turn, as a root set of equal shares has them.
    """
    reference = next(iter(learner.weights.values()))
    inputs = root.to(reference).detach().requires_grad_()
    weights = {name: value.detach().requires_grad_() for name, value in learner.weights.items()}
    noise = {name: torch.zeros((len(inputs), *value.shape[2:])).to(value) for name, value in learner.noise.items()}
    with torch.enable_grad():
        loss = learner.objective(weights, inputs, _targets(learner, inputs, noise), noise)
        gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True, allow_unused=True)
        return {name: _change(gradient, inputs) for name, gradient in zip(weights, gradients, strict=True)}


def _change(gradient: Tensor | None, inputs: Tensor) -> float:
    """Return how much the sum of a gradient changes with an input, on average over the inputs."""
    if gradient is None or gradient.numel() == 0 or not gradient.requires_grad:
        return 0.0
    (slope,) = torch.autograd.grad(gradient.sum(), inputs, retain_graph=True, allow_unused=True)
    if slope is None:
        return 0.0
    # The loss is a mean over the inputs, so what one of them does by itself is its slope times their number.
    size = len(inputs) * float(torch.linalg.vector_norm(slope.flatten(1), dim=1).mean())
    return size if math.isfinite(size) else 0.0


def _targets(learner: Learner, inputs: Tensor, noise: Named) -> Tensor:
    with torch.no_grad():
        found = learner.logits(learner.weights, inputs, noise)
    if found.ndim == 2:
        return torch.arange(len(inputs), device=inputs.device) % found.shape[1]
    return torch.zeros_like(found)


def cut_slices(sizes: dict[str, int], sensitivity: dict[str, float], slices: int) -> list[int]:
    """Return where slices begin and end in the row of all entries: ``slices + 1`` places, the first 0 and the last the end.

    The row is cut into atoms, as long as the greatest common divisor of the tensors' sizes; a tensor's sensitivity is spread
    evenly over its atoms; and slice k holds the atoms that begin within the k-th of ``slices`` equal parts of the total.
    """
    present = {name: size for name, size in sizes.items() if size}
    atom = math.gcd(*present.values())
    known = all(name in sensitivity for name in present) and sum(sensitivity[name] for name in present) > 0
    # Where nothing tells the tensors apart, every entry counts the same.
    total = {name: sensitivity[name] if known else float(size) for name, size in present.items()}
    whole = math.fsum(total.values())
    ends = list(accumulate(present.values()))
    reached = [0.0, *accumulate(total.values())]
    cuts = [0]
    for part in range(1, slices):
        wanted = whole * part / slices
        # The tensor in which the part ends; one without sensitivity that begins just there belongs to the next slice.
        index = max(i for i in range(len(ends)) if reached[i] < wanted)
        size = ends[index] - (ends[index - 1] if index else 0)
        inside = (wanted - reached[index]) / (reached[index + 1] - reached[index])
        place = ends[index] - size + math.ceil(round(inside * size / atom, 9)) * atom
        cuts.append(max(cuts[-1], min(place, ends[-1])))
    return [*cuts, ends[-1] if ends else 0]


def slice_of_entries(cuts: list[int]) -> Tensor:
    """Return the number of the slice that each entry of the row is in."""
    lengths = torch.tensor([end - begin for begin, end in pairwise(cuts)])
    return torch.arange(len(lengths)).repeat_interleave(lengths)
