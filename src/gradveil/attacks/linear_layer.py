"""The analytic attack on a linear layer: its input is the ratio of weight gradient and bias gradient (Phong et al. 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gradveil.attacks.base import ATTACKS, Attack, AttackCard, AttackContext
from gradveil.attacks.engine.labels import recover_labels
from gradveil.learning.learner import Learner
from gradveil.records import Knowledge, Observation, Reconstruction
from gradveil.tensors import Named

__all__ = ["LinearLayer", "features_at", "layer_inputs"]


def features_at(learner: Learner, layer: str, inputs: Tensor, noise: Named | None = None) -> Tensor:
    """Return the input of the module that owns the weight ``layer``, as (B, features); without ``noise``, at its mean."""
    caught: list[Tensor] = []

    def catch(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        caught.append(arguments[0])

    module = learner.model.get_submodule(layer.removesuffix(".weight"))
    handle = module.register_forward_pre_hook(catch)
    try:
        learner.forward(learner.weights, inputs, learner.zero_noise(inputs.shape[0]) if noise is None else noise)
    finally:
        handle.remove()
    return caught[0].reshape(inputs.shape[0], -1)


def layer_inputs(update: Named, layer: str, count: int) -> Tensor | None:
    """Return (count, features) estimates of a linear layer's inputs from its weight and bias gradients, or None.

    A layer's gradients are dW = sum_i delta_i a_i^T and db = sum_i delta_i. For one example every row of dW is db_r a, so the
    least-squares answer over rows is a = dW^T db / |db|^2, which also averages noise. For several examples a row moved by one
    example only gives that example exactly; rows are ranked by how far their ratio is from the rows already taken.
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


def _preprocessing(observation: Observation, layer: str) -> tuple[Tensor, Tensor] | None:
    """Return s and t of the map ``s x + t``, entry by entry, between input and first layer; None where it is no such map."""
    weight = observation.update.weights[layer]
    ramp = torch.linspace(0.1, 0.9, weight.shape[1]).to(weight)
    shape = (observation.examples, *observation.input_shape)
    probes = [value.expand(observation.examples, -1).reshape(shape) for value in (ramp * 0, ramp * 0 + 1, ramp)]
    with torch.no_grad():
        black, white, grey = (features_at(observation.learner, layer, probe)[0] for probe in probes)
    scale = white - black
    straight = torch.allclose(grey, black + scale * ramp, rtol=1e-4, atol=1e-4) and bool((scale.abs() > 1e-6).all())
    return (scale, black) if straight else None


@ATTACKS.register(
    AttackCard(
        name="linear_layer",
        summary="Divides the first layer's weight gradient by its bias gradient: the input itself, where that layer is linear.",
        paper="Phong et al., Privacy-Preserving Deep Learning via Additively Homomorphic Encryption, IEEE TIFS 2018",
        url="https://doi.org/10.1109/TIFS.2017.2787987",
        cost="one division",
        weakness="needs a linear first layer with a bias; for batches, units that only one example moves",
        needs=frozenset({Knowledge.ARCHITECTURE, Knowledge.EXAMPLES}),
        home="MLP, one 3×16×16 picture",
        floor_psnr=50.0,
    )
)
@dataclass(frozen=True, kw_only=True)
class LinearLayer(Attack):
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
        if _preprocessing(observation, name) is None:
            return "the first layer does not see the input itself"
        return None

    def run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        """Read every observation's inputs off its first layer."""
        found = []
        for index, observation in enumerate(each.clearest for each in observations):
            layer = next(iter(observation.update.weights))
            weight, bias = observation.update.weights[layer], observation.update.weights[layer.removesuffix("weight") + "bias"]
            mapped = _preprocessing(observation, layer)
            assert mapped is not None  # `applies` has checked
            scale, shift = mapped
            # sum_i delta_i (s x_i + t)^T minus db t^T, over s: the gradient of a layer that sees x itself.
            direct = (weight - bias[:, None] * shift) / scale
            inputs = layer_inputs({**observation.update.weights, layer: direct}, layer, observation.examples)
            if inputs is None:
                inputs = weight.new_full((observation.examples, weight.shape[1]), 0.5)
            shaped = inputs.reshape(observation.examples, *observation.input_shape)
            labels = recover_labels(observation)
            found.append(
                Reconstruction(shaped, labels, self.card.name, target=index, first_loss=1.0, best_loss=0.0, gradient_norm=1.0)
            )
        return found
