"""Weights packed for shipping: a safetensors file of byte planes, compressed by xz.

Half-precision numbers hardly compress as they stand: a byte of sign and exponent, which repeats, alternates with one of mantissa,
which is noise. Kept apart they take 15 % less, and nothing of the weights is lost. Where that is not little enough and pictures
do not show it, matrices are kept in fixed point: whole numbers of a step per output, which spends no bits on small weights that
matter as little as the rounding of large ones (36 % less).
"""

from __future__ import annotations

import lzma
from collections.abc import Mapping

import torch
from safetensors.torch import load, save
from torch import Tensor

__all__ = ["PACKED", "pack", "unpack"]

PACKED = ".xz"
"""How the name of a packed file ends."""
# Bytes of numbers: what stood before, or where, says nothing of what comes.
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 0, "lp": 0, "pb": 0}]
_LOW, _HIGH, _STEP = "/low", "/high", "/step"


def pack(weights: Mapping[str, Tensor], *, levels: int | None = None) -> bytes:
    """Return weights in half precision as one compressed file.

    Args:
        weights: By name; what is no floating-point number is kept as it is.
        levels: Steps per standard deviation of an output's weights, for matrices in fixed point; None keeps every bit.
    """
    planes: dict[str, Tensor] = {}
    for name, value in weights.items():
        if not value.is_floating_point():
            planes[name] = value.contiguous()
            continue
        code = value.half()
        if levels is not None and value.dim() > 1:
            wide = value.float().flatten(1)
            step = (wide.std(1) / levels).clamp_min(torch.finfo(torch.float32).tiny)
            whole = (wide / step[:, None]).round().clamp(-(2**14), 2**14 - 1).int()
            # Small numbers of either sign have an empty high byte: 0, -1, 1, -2 … become 0, 1, 2, 3 …
            code = torch.where(whole < 0, -2 * whole - 1, 2 * whole).to(torch.int16).reshape(value.shape)
            planes[name + _STEP] = step
        pairs = code.reshape(-1, 1).contiguous().view(torch.uint8).reshape(*value.shape, 2)
        planes[name + _LOW], planes[name + _HIGH] = pairs[..., 0].contiguous(), pairs[..., 1].contiguous()
    return lzma.compress(save(planes), format=lzma.FORMAT_XZ, filters=_FILTERS)


def unpack(content: bytes) -> dict[str, Tensor]:
    """Return the weights of `pack`.

    Raises:
        lzma.LZMAError, SafetensorError: The content is nothing that `pack` wrote.
    """
    planes = load(lzma.decompress(content, format=lzma.FORMAT_XZ))
    weights = {name: value for name, value in planes.items() if not name.endswith((_LOW, _HIGH, _STEP))}
    for name in (plane.removesuffix(_LOW) for plane in planes if plane.endswith(_LOW)):
        low, high, step = planes[name + _LOW], planes[name + _HIGH], planes.get(name + _STEP)
        pairs = torch.stack([low, high], -1)
        if step is None:
            weights[name] = pairs.view(torch.float16).squeeze(-1)
            continue
        code = pairs.view(torch.int16).squeeze(-1).int()
        whole = torch.where(code % 2 == 1, -(code + 1) // 2, code // 2)
        weights[name] = whole.float() * step.reshape(-1, *[1] * (whole.dim() - 1))
    return weights
