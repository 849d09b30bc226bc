"""Grad-CAM++: which pixels a model looks at when it answers, as one map per image.

Chattopadhay et al., Grad-CAM++: Generalized Gradient-based Visual Explanations for Deep Convolutional Networks, WACV 2018,
https://arxiv.org/abs/1710.11063. With the feature maps A (B, K, h, w) of one layer, the score S of the true answer and D = dS/dA,

    a = D² / (2 D² + Σ A D³),   w_k = Σ a_k relu(D_k),   map = relu(Σ_k w_k A_k)

where sums without an index run over h × w. The map is brought to the size of the image and to [0, 1]. The paper's factor exp(S)
in front of D is the same for all pixels of an image and cancels in the last step; it is left out, because it overflows.

Letters: B images, K feature maps of h × w, C outputs, H × W pixels.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.errors import UsageError, suggest

__all__ = ["answer_scores", "grad_cam_pp", "saliency_of", "top_share"]

POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.LPPool2d)
"""Maps are read before they are pooled: what pooling leaves is too coarse to point at anything."""

FLAT = 1e-5
"""A map whose values spread over less than this share of the largest counts as constant."""


def grad_cam_pp(
    forward: Callable[[Tensor], Tensor], model: nn.Module, inputs: Tensor, targets: Tensor, *, layer: str = "auto"
) -> Tensor:
    """Return maps (B, H, W) in [0, 1]; all zeros for an image whose map is constant, and for models without feature maps.

    All images are answered in one pass, and one backward pass goes from the scores to the layer only. Nothing stays behind: hooks
    are removed, no tensor of the model gets a gradient. Where BatchNorm uses the statistics of the batch, the images of a batch
    see each other.

    Args:
        forward: Asks ``model`` for its answers to inputs, with whatever weights; for example a learner's ``logits``.
        model: Whose submodules are looked at.
        inputs: (B, C, H, W).
        targets: The true answers; see `answer_scores`.
        layer: Name of the submodule whose output is read. ``auto`` takes the last one, in the order of execution, that gives
            maps of more than one pixel and is neither a pooling layer nor the model's output.
    """
    names = dict(model.named_modules())
    if layer != "auto" and layer not in names:
        raise UsageError(f"the model has no layer {layer!r}{suggest(layer, list(names))}")
    with torch.enable_grad(), _watched(model) as seen:
        outputs = forward(inputs.detach().requires_grad_())
        features = _chosen(seen, outputs, layer)
        if features is None:
            return inputs.new_zeros((inputs.shape[0], *inputs.shape[2:]))
        scores = answer_scores(outputs, targets)
        (slopes,) = torch.autograd.grad(scores.sum(), features, allow_unused=True, materialize_grads=True)
    return saliency_of(features.detach(), slopes, (int(inputs.shape[2]), int(inputs.shape[3])))


def saliency_of(features: Tensor, slopes: Tensor, size: tuple[int, int]) -> Tensor:
    """Return maps (B, *size) in [0, 1] from feature maps and the slopes of the scores in them, both (B, K, h, w)."""
    # Only ratios of D matter, but its squares and cubes leave single precision: bring the largest slope of an image to one first.
    largest = slopes.abs().amax((1, 2, 3), keepdim=True)
    d = slopes / torch.where(largest > 0, largest, torch.ones_like(largest))
    square = d.square()
    # In these units D² is D² / largest², and A D³ has one factor `largest` more than D² in the paper's formula.
    cubes = (features * d.pow(3)).sum((2, 3), keepdim=True) * largest
    below = 2 * square + cubes
    share = square / torch.where(below == 0, torch.ones_like(below), below)
    weights = (share * d.relu()).sum((2, 3), keepdim=True)  # (B, K, 1, 1)
    maps = (weights * features).sum(1, keepdim=True).relu()  # (B, 1, h, w)
    maps = F.interpolate(maps.nan_to_num(0.0, 0.0, 0.0), size=size, mode="bilinear", align_corners=False).squeeze(1)
    low, high = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)
    spread = high - low
    # Interpolating a constant map leaves differences in the last bits, which are no foreground.
    varies = spread > FLAT * high
    return torch.where(varies, (maps - low) / torch.where(varies, spread, torch.ones_like(spread)), torch.zeros_like(maps))


def answer_scores(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return, per image, how strongly the model gives the true answer (B,).

    * outputs (B, C) and class indices: the logit of the class; soft or several labels (B, C): the mean logit weighted by them.
    * outputs (B, 1) and zeros or ones: the logit, or minus the logit for a zero.
    * outputs (B, C, h, w), a segmentation: the sum over all pixels of the foreground's logit; of several channels the first is
      the background.
    """
    if outputs.ndim > 2:
        return (outputs if outputs.shape[1] == 1 else outputs[:, 1:]).flatten(1).sum(1)
    if outputs.shape[1] == 1:
        signs = torch.where(targets.reshape(-1) > 0.5, 1.0, -1.0).to(outputs)
        return outputs.squeeze(1) * signs
    if targets.shape == outputs.shape:
        return (targets.to(outputs) * outputs).sum(1)
    if targets.is_floating_point():
        return outputs.sum(1)
    return outputs.gather(1, targets.reshape(-1, 1)).squeeze(1)


def top_share(maps: Tensor, share: float) -> Tensor:
    """Return 1 at the ⌈share · H W⌉ largest pixels of each map (B, H, W), else 0; of equal ones the first count as larger."""
    flat = maps.flatten(1)
    # Rounded first: 0.3 · 10 is 3.0000000000000004 in floating point, and means 3.
    count = min(flat.shape[1], math.ceil(round(share * flat.shape[1], 6)))
    order = flat.sort(dim=1, descending=True, stable=True).indices[:, :count]
    return torch.zeros_like(flat).scatter(1, order, 1.0).reshape(maps.shape)


@contextlib.contextmanager
def _watched(model: nn.Module) -> Iterator[list[tuple[str, nn.Module, Tensor]]]:
    """Note what submodules return inside the block, in the order of execution."""
    seen: list[tuple[str, nn.Module, Tensor]] = []

    def note(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, _: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                seen.append((name, module, output))

        return hook

    handles = [module.register_forward_hook(note(name)) for name, module in model.named_modules() if name]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _chosen(seen: list[tuple[str, nn.Module, Tensor]], outputs: Tensor, layer: str) -> Tensor | None:
    named = [output for name, _, output in seen if name == layer]
    if layer != "auto":
        if not named or named[-1].ndim != 4:
            raise UsageError(f"layer {layer!r} does not give feature maps (B, K, h, w); choose a convolution, or auto")
        return named[-1]
    for _, module, output in reversed(seen):
        small = output.ndim != 4 or output.shape[2] * output.shape[3] == 1
        if not small and not isinstance(module, POOLS) and output is not outputs and output.requires_grad:
            return output
    return None
