"""The imagined attacker of the shadow defense: a generator whose latent codes and synthesis part are fitted to a client's images.

Letters: B images, C channels, H × W pixels, L entries of a latent code.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from gradveil.errors import UsageError
from gradveil.learning.adam import adam_step
from gradveil.learning.learner import Learner
from gradveil.models.batch_norm import batch_norm_layers
from gradveil.networks.cards import find_card
from gradveil.networks.store import load_network
from gradveil.tensors import Named

__all__ = ["Evidence", "Terms", "choose_generator", "fine_tune", "fit_codes", "generator_on", "imagine", "observe", "styles_of"]

LARGE = 48
"""Images whose longer side is at least this many pixels get the generator of 64 pixels."""

SMALLEST = 4
"""Side of a style generator's first block; each further one doubles it."""

WARM_UP = 50
"""Steps of a latent code before early stopping looks at it."""

ENOUGH = 1e-3
"""Share by which an error must fall below its best to count as smaller: Adam finds tiny gains forever."""

HALVINGS = (3 / 8, 5 / 8, 7 / 8)
"""When the learning rate of latent codes is halved, in shares of the steps."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Weights of the terms of the fine-tuning loss (6); the paper prints none, these are those of its released code.

    Attributes:
        gradient: D, the sum over tensors of the distance of gradients.
        statistics: R_BN, distance of BatchNorm statistics.
        variation: R_TV, roughness.
        energy: R_L2, length of the images over (H W)².
        pixels: L_MSE.
    """

    gradient: float = 1e-2
    statistics: float = 1e-2
    variation: float = 1e-5
    energy: float = 1e2
    pixels: float = 1.0


@dataclass(frozen=True, eq=False)
class Evidence:
    """What an attacker would see of a batch: its gradient, and the statistics of its BatchNorm layers where they can be known."""

    gradient: Named
    statistics: tuple[tuple[Tensor, Tensor], ...]


def choose_generator(name: str, images: Tensor) -> str:
    """Return the name or path of the generator for images (B, C, H, W); ``auto`` goes by channels and size."""
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        shape = tuple(images.shape[1:])
        raise UsageError(
            f"shadow needs images of one or three channels (C, H, W), not inputs of shape {shape}; use another defense"
        )
    if name != "auto":
        return name
    size = 64 if max(images.shape[2:]) >= LARGE else 32
    return f"style-{size}" + ("-grey" if images.shape[1] == 1 else "")


def generator_on(name: str, device: torch.device, side: int) -> nn.Module:
    """Return a style generator on a device for images of at most ``side`` pixels; it is shared, and nobody may change it."""
    return _prepared(name, find_card(name).stat().st_mtime_ns, device, side)


@functools.lru_cache(maxsize=4)
def _prepared(name: str, _changed: int, device: torch.device, side: int) -> nn.Module:
    network = load_network(name)
    if not all(hasattr(network, part) for part in ("mapping", "synthesis", "latent")):
        raise UsageError(f"shadow needs a style generator with mapping and synthesis parts, and {name!r} is none; try style-32")
    network = copy.deepcopy(network).to(device).eval().requires_grad_(False)
    _cut(network.synthesis, side)
    return network


def _cut(synthesis: Any, side: int) -> None:
    """Leave out the blocks past the first size that holds the image: what they add would be averaged away.

    Small images then cost less, in time and in the state of a client.
    """
    blocks = getattr(synthesis, "blocks", None)
    if isinstance(blocks, nn.ModuleList) and isinstance(getattr(synthesis, "depth", None), int):
        needed = next((count for count in range(1, len(blocks)) if SMALLEST * 2 ** (count - 1) >= side), len(blocks))
        synthesis.blocks, synthesis.depth = blocks[:needed], 2 * needed


def styles_of(network: Any, codes: Tensor) -> Tensor:
    """Return the styles of latent codes (B, L); the mapping stays as it is."""
    styles: Tensor = network.mapping(codes)
    return styles


def imagine(network: Any, styles: Tensor, weights: Named, like: Tensor) -> Tensor:
    """Return the pictures the synthesis part makes at ``weights``, in the channels, size and precision of ``like``.

    Smaller images get the picture averaged down, larger ones interpolated. A grey generator's picture is repeated over colours, a
    colour generator's averaged for grey images.
    """
    pictures: Tensor = functional_call(network.synthesis, weights, (styles,))
    if pictures.shape[1] != like.shape[1]:
        pictures = pictures.mean(1, keepdim=True).expand(-1, like.shape[1], -1, -1)
    if pictures.shape[2:] != like.shape[2:]:
        pictures = F.interpolate(pictures, size=like.shape[2:], mode="bilinear", align_corners=False, antialias=True)
    return pictures.to(like.dtype)


def fit_codes(network: Any, weights: Named, images: Tensor, start: Tensor, *, steps: int, rate: float, patience: int) -> Tensor:
    """Return latent codes (B, L) whose pictures are near the images: sample-level pre-training.

    Adam on the mean squared error of each image by itself, all images at once. After 50 steps an image is done when its error
    has not fallen by a thousandth below its best for ``patience`` steps; its best code is kept. The learning rate is halved at
    3/8, 5/8 and 7/8.

    Args:
        network: Style generator.
        weights: Of its synthesis part; not changed.
        images: (B, C, H, W).
        start: (B, L) codes to start from.
        steps: At most so many; 0 returns the start.
        rate: Learning rate.
        patience: Steps without a new best that end an image's search.
    """
    best, open_rows = start.detach().clone(), torch.arange(len(start), device=start.device)
    codes, goal = best.clone(), images
    mean, square = torch.zeros_like(codes), torch.zeros_like(codes)
    least = torch.full((len(codes),), torch.inf, device=codes.device, dtype=images.dtype)
    mark = least.clone()
    idle = torch.zeros(len(codes), dtype=torch.int64, device=codes.device)
    for step in range(steps + 1):
        leaf = codes.detach().requires_grad_()
        with torch.enable_grad():
            errors = (imagine(network, styles_of(network, leaf), weights, goal) - goal).square().flatten(1).mean(1)
            (slope,) = torch.autograd.grad(errors.sum(), leaf)
        errors = errors.detach()
        better, clearly = errors < least, errors < mark * (1 - ENOUGH)
        best[open_rows[better]] = codes[better]
        least, mark = torch.minimum(errors, least), torch.where(clearly, errors, mark)
        idle = torch.where(clearly, 0, idle + 1)
        going = (idle < patience) | (step < WARM_UP)
        if step == steps or not bool(going.any()):
            break
        own = rate * 0.5 ** sum(step >= share * steps for share in HALVINGS)
        move, mean, square = adam_step(slope, mean, square, step, rate=own)
        codes = codes - move
        if not bool(going.all()):
            # Those that are done cost nothing any more.
            open_rows, goal, codes, mean, square = (each[going] for each in (open_rows, goal, codes, mean, square))
            least, mark, idle = least[going], mark[going], idle[going]
    return best


def observe(learner: Learner, inputs: Tensor, targets: Tensor, noise: Named, *, differentiable: bool = False) -> Evidence:
    """Return what a batch's update would show: gradient at the global weights, and BatchNorm statistics in train mode.

    With running statistics (batch_norm = "eval") nothing of the batch's own statistics is used or sent, and there are none here.
    """
    leaves = {name: value.detach().requires_grad_() for name, value in learner.weights.items()}
    with torch.enable_grad(), _normalised(learner) as seen:
        loss = learner.objective(leaves, inputs, targets, noise)
        found = torch.autograd.grad(
            loss, list(leaves.values()), create_graph=differentiable, allow_unused=True, materialize_grads=True
        )
        kept = seen if differentiable else [value.detach() for value in seen]
        statistics = tuple((value.mean(axes), value.var(axes, correction=0)) for value in kept if (axes := _axes(value)))
    return Evidence(dict(zip(leaves, found, strict=True)), statistics)


def fine_tune(
    network: Any,
    weights: Named,
    codes: Tensor,
    images: Tensor,
    targets: Tensor,
    learner: Learner,
    noise: Named,
    real: Evidence,
    *,
    terms: Terms,
    steps: int,
    rate: float,
) -> Named:
    """Return synthesis weights after ``steps`` steps of Adam on the imagined attacker's loss (6); codes and mapping stay.

    The attacker compares with the evidence of the real batch, and is helped by the images themselves (L_MSE).
    """
    with torch.no_grad():
        styles = styles_of(network, codes)
    moved = {name: value.detach() for name, value in weights.items()}
    mean = {name: torch.zeros_like(value) for name, value in moved.items()}
    square = dict(mean)
    for step in range(steps):
        leaves = {name: value.requires_grad_() for name, value in moved.items()}
        with torch.enable_grad():
            pictures = imagine(network, styles, leaves, images)
            loss = shadow_loss(pictures, images, targets, learner, noise, real, terms)
            slopes = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
        for (name, leaf), slope in zip(leaves.items(), slopes, strict=True):
            move, mean[name], square[name] = adam_step(slope, mean[name], square[name], step, rate=rate)
            moved[name] = leaf.detach() - move
    return {name: value.detach() for name, value in moved.items()}


def shadow_loss(
    pictures: Tensor, images: Tensor, targets: Tensor, learner: Learner, noise: Named, real: Evidence, terms: Terms
) -> Tensor:
    """Return the loss (6) of imagined pictures against a real batch."""
    total = terms.pixels * F.mse_loss(pictures, images)
    if terms.gradient or (terms.statistics and real.statistics):
        own = observe(learner, pictures, targets, noise, differentiable=True)
        total = total + terms.gradient * torch.stack([_length(own.gradient[n] - g) for n, g in real.gradient.items()]).sum()
        for (mean, variance), (mean_t, variance_t) in zip(own.statistics, real.statistics, strict=True):
            total = total + terms.statistics * (_length(mean - mean_t) + _length(variance - variance_t))
    pixels = pictures.shape[2] * pictures.shape[3]
    return total + terms.variation * _variation(pictures) + terms.energy * _length(pictures) / pixels**2


def _variation(images: Tensor) -> Tensor:
    """Sum of the lengths of the differences of neighbours: down, right, and along both diagonals."""
    down, right = images[:, :, 1:] - images[:, :, :-1], images[:, :, :, 1:] - images[:, :, :, :-1]
    falling = images[:, :, 1:, 1:] - images[:, :, :-1, :-1]
    rising = images[:, :, 1:, :-1] - images[:, :, :-1, 1:]
    return torch.stack([_length(part) for part in (down, right, falling, rising)]).sum()


def _length(value: Tensor) -> Tensor:
    # torch's norm has slope 0 at zero; an empty tensor has length 0.
    length: Tensor = torch.linalg.vector_norm(value)
    return length


def _axes(value: Tensor) -> tuple[int, ...]:
    return tuple(axis for axis in range(value.ndim) if axis != 1)


@contextlib.contextmanager
def _normalised(learner: Learner) -> Iterator[list[Tensor]]:
    """Note the inputs of BatchNorm layers inside the block, where they run on the statistics of the batch."""
    seen: list[Tensor] = []

    def note(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        seen.append(given[0])

    layers = batch_norm_layers(learner.model).values() if learner.settings.batch_norm == "train" else ()
    handles = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
