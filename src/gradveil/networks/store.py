"""Trained weights: a safetensors file, plain or packed, and a card beside it, verified before use.

The card holds the SHA-256 of the weights; a file that does not match is refused. The hash guards against damage and mix-ups; who
distrusts a card as well gives the hash from elsewhere (``sha256=``).
"""

from __future__ import annotations

import copy
import hashlib
import lzma
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from gradveil import __version__
from gradveil.errors import UsageError, suggest
from gradveil.networks.base import NETWORKS
from gradveil.networks.cards import FORMAT, find_card, read_card, weights_beside
from gradveil.networks.packing import PACKED, unpack
from gradveil.storage.files import json_bytes, write_whole

__all__ = ["load_network", "save_network"]


def load_network(name_or_path: str, *, sha256: str | None = None) -> nn.Module:
    """Return a trained network on the CPU, in eval mode, its parameters frozen.

    Args:
        name_or_path: A registered name, or the path of a ``.safetensors`` file or of its ``.json`` card.
        sha256: What the weights must hash to, where the card alone is not trusted.

    Raises:
        UsageError: Unknown name, missing or damaged file, in one sentence.
    """
    path = find_card(name_or_path)
    return copy.deepcopy(_load(str(path), path.stat().st_mtime_ns, sha256))


def save_network(network: nn.Module, path: Path, card: Mapping[str, Any], *, half: bool) -> Path:
    """Write weights and card side by side and return the card's path.

    Args:
        network: What to save.
        path: Of the weights, ending in ``.safetensors``.
        card: What the reader must know: ``network``, ``settings``, data, licence, seed, metrics.
        half: Keep half precision.
    """
    kind = torch.float16 if half else torch.float32
    tensors = {
        name: (value.to(kind) if value.is_floating_point() else value).cpu().contiguous()
        for name, value in network.state_dict().items()
    }
    content = save(tensors)
    told = {
        "format": FORMAT,
        **card,
        "precision": "float16" if half else "float32",
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "gradveil": __version__,
        "torch": str(torch.__version__),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    # Weights first: a card is the promise that they are there.
    write_whole(path, content)
    write_whole(path.with_suffix(".json"), json_bytes(told))
    return path.with_suffix(".json")


@lru_cache(maxsize=8)
def _load(card_path: str, _changed: int, sha256: str | None) -> nn.Module:
    card = read_card(Path(card_path))
    tensors = _verified(weights_beside(Path(card_path)), str(card["sha256"]), sha256)
    name = str(card["network"])
    if name not in NETWORKS.names():
        raise UsageError(f"{card_path!r} describes a network {name!r} that is not known here{suggest(name, NETWORKS.names())}")
    try:
        network = NETWORKS.get(name)(**card.get("settings", {}))
        network.load_state_dict({key: value.float() if value.is_floating_point() else value for key, value in tensors.items()})
    except (TypeError, ValueError, RuntimeError) as error:
        first = str(error).splitlines()[0][:160]
        raise UsageError(
            f"the weights beside {card_path!r} do not fit the network on the card ({first}); train it again"
        ) from error
    return network.eval().requires_grad_(False)


def _verified(path: Path, expected: str, trusted: str | None) -> dict[str, Tensor]:
    """Read weights whose hash is the one on the card, and the one given, if any."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"the card has no weights beside it: cannot read {str(path)!r}; train or download them again") from error
    found = hashlib.sha256(content).hexdigest()
    if found != expected or (trusted is not None and found != trusted.lower()):
        raise UsageError(
            f"the weights {str(path)!r} are damaged or changed: their SHA-256 is {found[:12]}…, not "
            f"{(expected if found != expected else str(trusted))[:12]}…; train or download them again"
        )
    try:
        tensors = unpack(content) if path.suffix == PACKED else load(content)
    except (SafetensorError, lzma.LZMAError) as error:
        raise UsageError(f"the weights {str(path)!r} are no safetensors file ({error}); train or download them again") from error
    if not all(bool(torch.isfinite(value).all()) for value in tensors.values() if value.is_floating_point()):
        raise UsageError(f"the weights {str(path)!r} hold numbers that are not finite; train or download them again")
    return tensors
