"""Noise fraction: how much of a picture is noise, as Refiner's evaluation network judges it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradveil.errors import UsageError
from gradveil.metrics.base import METRICS, MetricCard, Unavailable, check_pair

__all__ = ["NETWORK", "predicted_noise", "predicted_noise_by"]

NETWORK = "evaluation-32"
AT_ONCE = 256


@METRICS.register(
    MetricCard(
        name="noise_fraction",
        summary="Share of noise in the reconstruction, from 0 to 1, as predicted by the evaluation network of Refiner.",
        cost="One pass of a small network over each picture, at 32 x 32; needs its weights.",
        weakness=(
            "Sees the reconstruction alone: a clean picture of something else scores as well as the record. Faults other than "
            "noise, such as blur, are not what it was trained on."
        ),
        higher_is_better=False,
        perfect=0.0,
        reference=False,
    )
)
def predicted_noise(reconstructed: Tensor, original: Tensor) -> Tensor:
    """Return the predicted share of noise of each reconstruction.

    Args:
        reconstructed: (N, C, H, W) in [0, 1], with one or three channels; the network resizes to 32 x 32.
        original: Same shape; not looked at.

    Returns:
        (N,) in [0, 1], double precision.

    Raises:
        Unavailable: Without the network's weights (nothing else is ever reported under this name), and for what is no picture.
    """
    check_pair(reconstructed, original)
    return predicted_noise_by(_network(), reconstructed)


@torch.no_grad()
def predicted_noise_by(network: nn.Module, images: Tensor) -> Tensor:
    """Return the share of noise (N,) that a given evaluation network sees in pictures (N, C, H, W)."""
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise Unavailable(
            f"the evaluation network judges grey and colour pictures, not inputs of shape {tuple(images.shape[1:])}"
        )
    reference = next(network.parameters())
    # The picture's own precision is not the network's: what comes in half or double precision is judged in that of the weights.
    parts = [network(part.to(reference.device, reference.dtype)).double() for part in images.split(AT_ONCE)]
    return torch.cat(parts).to(images.device)


def _network() -> nn.Module:
    try:
        from gradveil.networks.store import load_network

        network: nn.Module = load_network(NETWORK)
    except ImportError as error:
        raise Unavailable(f"the weights of {NETWORK!r} cannot be had ({error})") from error
    except UsageError as error:
        raise Unavailable(str(error)) from error
    return network
