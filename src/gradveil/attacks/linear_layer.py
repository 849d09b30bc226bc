"""The analytic attack on a linear layer: its input is the ratio of weight gradient and bias gradient (Phong et al. 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradveil.attacks.base import ATTACKS, AttackCard, Desk
from gradveil.attacks.labels import recover_labels
from gradveil.records import Knowledge, Observation, Reconstruction
from gradveil.tensors import Named

__all__ = ["LinearLayer", "layer_inputs"]


def layer_inputs(update: Named, layer: str, count: int) -> Tensor | None:
    """Return (count, features) estimates of a linear layer's inputs from its weight and bias gradients, or None.

    A layer's gradients are dW = sum_i delta_i a_i^T and db = sum_i delta_i. For one example every row of dW is db_r a, so the least-squares answer over rows is
    a = dW^T db / |db|^2, which also averages noise. For several examples a row moved by one example only gives that example exactly; rows are ranked by how far
    their ratio is from the rows already taken.
    """
    weight, bias = update.get(layer), update.get(layer.removesuffix("weight") + "bias")
    if weight is None or bias is None or not bool(bias.abs().max() > 0):
        return None
    if count == 1:
        return (weight.T @ bias / bias.square().sum()).unsqueeze(0)
    return _distinct_rows(weight, bias, count)


def _distinct_rows(weight: Tensor, bias: Tensor, count: int) -> Tensor:
    """Choose rows far apart from each other among those with a usable bias gradient, preferring ratios inside [0, 1]."""
    usable = bias.abs() > 1e-4 * bias.abs().max()
    ratios = weight[usable] / bias[usable].unsqueeze(1)
    outside = (ratios - ratios.clamp(0, 1)).square().mean(1)
    taken = [int(outside.argmin())]
    distance = (ratios - ratios[taken[0]]).square().mean(1)
    while len(taken) < count:
        # A row far outside the box mixes several examples; it is taken only when nothing better is left.
        score = distance - 10 * outside
        score[taken] = float("-inf")
        taken.append(int(score.argmax()) if len(taken) < len(ratios) else taken[-1])
        distance = torch.minimum(distance, (ratios - ratios[taken[-1]]).square().mean(1))
    return ratios[taken]


@ATTACKS.register(
    AttackCard(
        name="linear_layer",
        summary="Divides the first layer's weight gradient by its bias gradient: the input itself, where the model starts with a linear layer.",
        paper="Phong et al., Privacy-Preserving Deep Learning via Additively Homomorphic Encryption, IEEE TIFS 2018",
        url="https://doi.org/10.1109/TIFS.2017.2787987",
        cost="one division",
        weakness="needs a linear first layer with a bias; for batches, units that only one example moves",
        needs=frozenset({Knowledge.ARCHITECTURE}),
        home="MLP, one image",
        floor_psnr=50.0,
    )
)
@dataclass(frozen=True, kw_only=True)
class LinearLayer:
    """``x = dW^T db / |db|^2`` for one example; for batches, row ratios ``dW_r / db_r`` of rows far apart.

    Departs from the paper: least squares over all rows instead of one row, which averages noise.

    Cost: one division. Known weakness: only models whose first layer is linear; several local steps blur it.
    """

    card: ClassVar[AttackCard]

    def applies(self, observation: Observation) -> str | None:
        """Return why not, unless the first weight is a matrix that takes the flattened input."""
        name = next(iter(observation.update.weights))
        weight = observation.update.weights[name]
        size = torch.Size(observation.input_shape).numel()
        if weight.ndim != 2 or weight.shape[1] != size:
            return "the model does not start with a linear layer on the whole input"
        if name.removesuffix("weight") + "bias" not in observation.update.weights:
            return "the first layer has no bias"
        return None

    def run(self, observations: Sequence[Observation], desk: Desk) -> list[Reconstruction]:
        """Read every observation's inputs off its first layer."""
        found = []
        for index, observation in enumerate(observations):
            layer = next(iter(observation.update.weights))
            inputs = layer_inputs(observation.update.weights, layer, observation.examples)
            if inputs is None:
                inputs = torch.full((observation.examples, torch.Size(observation.input_shape).numel()), 0.5)
            shaped = inputs.reshape(observation.examples, *observation.input_shape)
            found.append(
                Reconstruction(shaped, recover_labels(observation), self.card.name, target=index, first_loss=1.0, best_loss=0.0, gradient_norm=1.0)
            )
        return found
