"""The mathematics of Refiner: how much a gradient matters, how far two are apart, descent on the data, and the ball.

Letters: B examples, i a layer counted from 1, g the gradient of the raw data, θ the weights, x* the robust data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from gradveil.learning.adam import AdamRule, adam_step
from gradveil.learning.learner import Learner
from gradveil.tensors import Named

__all__ = ["Refinement", "Scope", "importance", "layer_numbers", "project_on_ball", "weighted_gap"]

Scope = Literal["global", "layer"]
Terms = Literal["relative", "log", "raw"]
Optimiser = Literal["adam", "gradient"]

RULE = AdamRule(outside=1e-12)
FLOOR = 1e-8
"""Keeps logarithms finite where a gradient is matched exactly."""

SMALLEST = 1e-12
"""Share of a zero gradient's utility metric below which a metric is rounding of float32."""


def layer_numbers(names: Iterable[str]) -> dict[str, int]:
    """Return the number of the layer each tensor belongs to, from 1; the weight and bias of one layer share theirs.

    >>> layer_numbers(["conv.weight", "conv.bias", "scale", "head.weight"])
    {'conv.weight': 1, 'conv.bias': 1, 'scale': 2, 'head.weight': 3}
    """
    numbers: dict[str, int] = {}
    return {name: numbers.setdefault(name.rpartition(".")[0] or name, len(numbers) + 1) for name in names}


def importance(gradient: Named, weights: Named, decay: float) -> Named:
    """Return |g θ τ^i| entry by entry (Eq. 3): how much the utility metric cares about each entry; constants."""
    numbers = layer_numbers(gradient)
    return {name: (value * weights[name]).abs().detach() * decay ** numbers[name] for name, value in gradient.items()}


def weighted_gap(found: Named, wanted: Named, weight: Named) -> Tensor:
    """Return Σ_i ‖w_i (found_i - wanted_i)‖², the utility metric (Eq. 4, read as a sum of squared norms)."""
    return torch.stack([(weight[name] * (value - wanted[name])).square().sum() for name, value in found.items()]).sum()


def project_on_ball(gradient: Named, centre: Named, epsilon: float, scope: Scope, relative: bool) -> tuple[Named, Tensor]:
    """Return the point of the ball around ``centre`` nearest to ``gradient``, and the share λ of ``gradient`` in it.

    With δ = ‖gradient - centre‖ and λ = min(1, ε / δ) it is ``centre + λ (gradient - centre)``: a mixture in which the centre
    has weight 1 - λ. Inside the ball nothing changes, to the bit. Differentiable, and safe under vmap.

    Args:
        gradient: The gradient of the robust data.
        centre: The gradient of the raw data.
        epsilon: Radius ε.
        scope: ``global`` is one ball for all tensors, ``layer`` one of radius ε for each layer.
        relative: Measure the radius in norms of the centre.

    Returns:
        The projected gradient and one λ per ball.
    """
    numbers = layer_numbers(gradient) if scope == "layer" else dict.fromkeys(gradient, 1)
    shares: dict[int, Tensor] = {}
    for number in dict.fromkeys(numbers.values()):
        own = [name for name in gradient if numbers[name] == number]
        # In double precision: sums over millions of squares would lose the last digits of a small distance.
        gap = torch.stack([(gradient[n].double() - centre[n].double()).square().sum() for n in own]).sum()
        size = torch.stack([centre[n].double().square().sum() for n in own]).sum()
        outside = gap > 0
        length = torch.where(outside, gap, torch.ones_like(gap)).sqrt()
        radius = epsilon * torch.where(size > 0, size, torch.zeros_like(size) + 1e-300).sqrt() if relative else epsilon
        shares[number] = torch.where(outside, (radius / length).clamp(max=1.0), torch.ones_like(gap))
    projected = {}
    for name, value in gradient.items():
        share = shares[numbers[name]]
        moved = centre[name].double() + share * (value.double() - centre[name].double())
        projected[name] = torch.where(share < 1, moved.to(value.dtype), value)
    return projected, torch.stack(list(shares.values()))


@dataclass(frozen=True)
class Refinement:
    """Descent on x* that keeps the gradient and raises the noise that the evaluation network sees.

    Attributes:
        learner: The model the data is refined for; its weights are constants here.
        network: The evaluation network D; only its answer is differentiated, never its weights.
        balance: β, the weight of the privacy metric.
        steps: ι, descent steps.
        decay: τ of the layers' weights.
        rate: Step size.
        terms: How the two metrics are brought to one scale; see `Refiner`.
        optimiser: ``adam``, or plain ``gradient`` descent.
    """

    learner: Learner
    network: nn.Module | None
    balance: float
    steps: int
    decay: float
    rate: float
    terms: Terms
    optimiser: Optimiser

    def jointly(self, raw: Tensor, start: Tensor, targets: Tensor, noise: Named) -> tuple[Tensor, Named]:
        """Refine all examples so that their mean gradient is kept; return x* and the raw mean gradient."""
        learner = self.learner
        wanted = {name: value.detach() for name, value in learner.gradient(learner.weights, raw, targets, noise).items()}
        weight, energy = self._weights(wanted)
        squared = {name: value.square() for name, value in weight.items()}

        def slope(inputs: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
            # Plain autograd: half the bookkeeping of nested transforms, and only the path to the inputs is walked back.
            leaf = inputs.detach().requires_grad_()
            leaves = {name: value.detach().requires_grad_() for name, value in learner.weights.items()}
            with torch.enable_grad():
                loss = learner.objective(leaves, leaf, targets, noise)
                found = torch.autograd.grad(
                    loss, list(leaves.values()), create_graph=True, allow_unused=True, materialize_grads=True
                )
                seen = self.network(leaf).mean() if self.balance and self.network is not None else leaf.sum() * 0
            # UM is quadratic, so its slope at the gradient is known: it need not be part of the graph that is walked back.
            apart = {name: own.detach() - wanted[name] for name, own in zip(leaves, found, strict=True)}
            pulls = {name: squared[name] * gap for name, gap in apart.items()}
            gap = torch.stack([(apart[name] * pull).sum() for name, pull in pulls.items()]).sum()
            utility, privacy, unit = self._rates(gap, unit, energy, seen.detach())
            ends = [(own, 2 * utility * pull) for own, pull in zip(found, pulls.values(), strict=True) if own.requires_grad]
            ends.append((seen, privacy))
            outputs, starts = zip(*ends, strict=True)
            (own,) = torch.autograd.grad(outputs, [leaf], starts, allow_unused=True, materialize_grads=True)
            # The metrics are means over examples; a step must not shrink with the company it is in.
            return own * len(inputs), unit

        return self._descend(start, slope, torch.zeros_like(energy)), wanted

    def singly(self, raw: Tensor, start: Tensor, targets: Tensor, noise: Named) -> tuple[Tensor, Named]:
        """Refine every example so that its own gradient is kept, all in one program; return x* and the raw mean gradient."""
        learner = self.learner
        wanted = learner.per_example_gradients(learner.weights, raw, targets, noise)
        wanted = {name: value.detach() for name, value in wanted.items()}
        weight, energy = vmap(self._weights)(wanted)

        def one(x: Tensor, unit: Tensor, y: Tensor, own: Named, goal: Named, scale: Named, size: Tensor) -> tuple[Tensor, Tensor]:
            alone = x.unsqueeze(0)
            found = learner.gradient(learner.weights, alone, y.unsqueeze(0), {n: v.unsqueeze(0) for n, v in own.items()})
            return self._objective(weighted_gap(found, goal, scale), unit, size, alone)

        slopes = vmap(grad(one, has_aux=True), in_dims=(0, 0, 0, 0 if noise else None, 0, 0, 0))

        def slope(inputs: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
            own, unit = slopes(inputs, unit, targets, noise, wanted, weight, energy)
            return own.detach(), unit

        refined = self._descend(start, slope, torch.zeros_like(energy))
        return refined, {name: value.mean(0) for name, value in wanted.items()}

    def _weights(self, wanted: Named) -> tuple[Named, Tensor]:
        """Return the entries' weights, and the utility metric of sending nothing at all."""
        weight = importance(wanted, self.learner.weights, self.decay)
        if self.terms != "raw":
            # Squares of products of small numbers underflow; a common factor cancels in the relative and the logarithmic form.
            largest = torch.stack([value.amax() for value in weight.values() if value.numel()]).amax()
            weight = {name: value / torch.where(largest > 0, largest, torch.ones_like(largest)) for name, value in weight.items()}
        energy = torch.stack([(weight[name] * value).square().sum() for name, value in wanted.items()]).sum()
        return weight, torch.where(energy > 0, energy, torch.ones_like(energy))

    def _objective(self, gap: Tensor, unit: Tensor, energy: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return UM - β PM (Eq. 2) in the chosen form, and the unit of UM: its value at the first step, or ``energy`` for 0."""
        unit = _unit(gap, unit, energy)
        utility = gap if self.terms == "raw" else gap / unit
        utility = torch.log(utility + FLOOR) if self.terms == "log" else utility
        if not self.balance or self.network is None:
            return utility, unit
        privacy = self.network(inputs).mean()
        return utility - self.balance * (torch.log(privacy + FLOOR) if self.terms == "log" else privacy), unit

    def _rates(self, gap: Tensor, unit: Tensor, energy: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the derivatives of that objective with respect to UM and to PM, and the unit."""
        unit = _unit(gap, unit, energy)
        if self.terms == "log":
            return 1 / (gap + FLOOR * unit), -self.balance / (seen + FLOOR), unit
        one = torch.ones_like(unit)
        return one if self.terms == "raw" else one / unit, -self.balance * torch.ones_like(seen), unit

    def _descend(self, start: Tensor, slope: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], unit: Tensor) -> Tensor:
        """Take the steps, each followed by a clamp to [0, 1]."""
        inputs = start
        mean, square = torch.zeros_like(start), torch.zeros_like(start)
        for step in range(self.steps):
            found, unit = slope(inputs, unit)
            if self.optimiser == "adam":
                found, mean, square = adam_step(found, mean, square, step, rule=RULE)
            # A model that saturates may have no finite slope somewhere; such a pixel stays where it is.
            inputs = (inputs - self.rate * torch.nan_to_num(found, 0.0, 0.0, 0.0)).clamp(0, 1)
        return inputs.detach()


def _unit(gap: Tensor, unit: Tensor, energy: Tensor) -> Tensor:
    return torch.where(unit > 0, unit, torch.where(gap > SMALLEST * energy, gap, energy).detach())
