"""Learned perceptual image patch similarity (LPIPS), version 0.1, in plain torch: no torchvision, no lpips package."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from gradveil.metrics.base import METRICS, MetricCard, Unavailable, check_pair
from gradveil.metrics.lpips_weights import NETS, Weights, load_weights

__all__ = ["SMALLEST", "lpips_alex", "lpips_distance", "lpips_vgg"]

SMALLEST = 32
"""Shortest side, in pixels, for which LPIPS is reported."""

# The statistics of ImageNet, for images in [-1, 1].
SHIFT = (-0.030, -0.088, -0.188)
SCALE = (0.458, 0.448, 0.450)
EPSILON = 1e-10

PIXELS_AT_ONCE = 2**18  # 256 images of 32 x 32: bounds the memory of the first, widest features

PAPER = "Zhang et al., The unreasonable effectiveness of deep features as a perceptual metric, 2018"
URL = "https://arxiv.org/abs/1801.03924"


@METRICS.register(
    MetricCard(
        name="lpips",
        summary="Weighted distance between the VGG-16 features of two images, fitted to human judgement (version 0.1, VGG).",
        paper=PAPER,
        url=URL,
        cost="One pass of VGG-16 per image; needs 59 MB of weights that do not ship with this package.",
        weakness="Fitted on 64 x 64 photographs; for digits, medical or tiny images no human judgement stands behind it.",
        higher_is_better=False,
        perfect=0.0,
    )
)
def lpips_vgg(reconstructed: Tensor, original: Tensor) -> Tensor:
    """Return LPIPS through VGG-16: what `lpips` means in this package.

    See `lpips_distance` for arguments, rules and the reasons for being unavailable. VGG and not AlexNet because data here are
    mostly 32 x 32: AlexNet starts with a stride of 4 and pools twice, so that three of its five layers see such an image as a
    single pixel, while the last layer of VGG still sees 2 x 2.
    """
    return lpips_distance(reconstructed, original, "vgg")


@METRICS.register(
    MetricCard(
        name="lpips_alex",
        summary="Weighted distance between the AlexNet features of two images, fitted to human judgement (version 0.1, AlexNet).",
        paper=PAPER,
        url=URL,
        cost="One pass of AlexNet's convolutions per image; needs 10 MB of weights that do not ship with this package.",
        weakness="At 32 x 32 three of its five layers are a single pixel; here to compare with papers that used it.",
        higher_is_better=False,
        perfect=0.0,
    )
)
def lpips_alex(reconstructed: Tensor, original: Tensor) -> Tensor:
    """Return LPIPS through AlexNet; see `lpips_distance`."""
    return lpips_distance(reconstructed, original, "alex")


def lpips_distance(reconstructed: Tensor, original: Tensor, net: str, weights: Weights | None = None) -> Tensor:
    r"""Return :math:`\sum_l \frac{1}{H_l W_l} \sum_{h,w} w_l \cdot (\hat y_l - \hat x_l)^2` over unit-normalised features.

    Args:
        reconstructed: (N, 3, H, W) or (N, 1, H, W) in [0, 1]; grey is repeated to three channels. At least 32 x 32.
        original: Same shape.
        net: ``"vgg"`` or ``"alex"``.
        weights: Tensors in the layout of `load_weights`, which is the default. Others make another metric, not LPIPS.

    Returns:
        (N,), double precision, 0 for a perfect reconstruction.

    Raises:
        Unavailable: If the genuine weights are not to be had, or the input is no image of at least 32 x 32 in grey or colour.
            Smaller images are not enlarged, for that would measure the interpolation.
    """
    x, y = check_pair(reconstructed, original)
    if x.ndim != 4 or x.shape[1] not in (1, 3) or min(x.shape[2:]) < SMALLEST:
        raise Unavailable(
            f"LPIPS takes grey or colour images of at least {SMALLEST} x {SMALLEST}, not shape {tuple(x.shape[1:])}"
        )
    weights = load_weights(net) if weights is None else weights
    # In single precision CUDA convolves in TF32 unless a global switch says otherwise; double keeps values equal across devices.
    precision = torch.float32 if x.device.type == "cpu" else torch.float64
    weights = {name: value.to(x.device, precision) for name, value in weights.items()}
    step = max(1, PIXELS_AT_ONCE // (x.shape[2] * x.shape[3]))
    parts = [_distance(a.to(precision), b.to(precision), net, weights) for a, b in zip(x.split(step), y.split(step), strict=True)]
    return torch.cat(parts).double()


def _distance(x: Tensor, y: Tensor, net: str, weights: Weights) -> Tensor:
    total = x.new_zeros(len(x))
    for index, (left, right) in enumerate(zip(_features(x, net, weights), _features(y, net, weights), strict=True)):
        squared = (_unit(left) - _unit(right)).square()  # (n, C, h, w)
        total = total + torch.einsum("nchw,c->nhw", squared, weights[f"head{index}"]).mean(dim=(1, 2))
    return total


def _unit(features: Tensor) -> Tensor:
    """Scale the channels at each position to unit length."""
    return features / (features.square().sum(dim=1, keepdim=True).sqrt() + EPSILON)


def _features(images: Tensor, net: str, weights: Weights) -> list[Tensor]:
    """Return the rectified features at the taps, from images (n, 1 or 3, H, W) in [0, 1]."""
    shift, scale = (images.new_tensor(values).view(1, 3, 1, 1) for values in (SHIFT, SCALE))
    hidden = (2.0 * images - 1.0 - shift) / scale  # (n, 3, H, W): a grey image spreads over the channels here
    taps = NETS[net].taps
    kept = []
    for index in range(len(NETS[net].kernels)):
        weight, bias = weights[f"conv{index}.weight"], weights[f"conv{index}.bias"]
        if net == "alex":
            stride, padding = (4, 2) if index == 0 else (1, weight.shape[-1] // 2)
            hidden = functional.max_pool2d(hidden, 3, 2) if index in (1, 2) else hidden
        else:
            stride, padding = 1, 1
            hidden = functional.max_pool2d(hidden, 2) if index - 1 in taps else hidden
        hidden = functional.conv2d(hidden, weight, bias, stride=stride, padding=padding).relu()
        if index in taps:
            kept.append(hidden)
    return kept
