"""Trained weights: a safetensors file and a card, found by name or path, verified before use.

A name is looked for among the weights that ship with the package, then in the user's cache folder (``GRADVEIL_CACHE``, else
``~/.cache/gradveil``), where `gradveil pretrain` puts what it trains or downloads. A path names the weights or the card beside
them. The card holds the SHA-256 of the weights; a file that does not match is refused. The hash guards against damage and
mix-ups; who distrusts a card as well gives the hash from elsewhere (``sha256=``).
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from gradveil import __version__
from gradveil.durable import json_bytes, write_whole
from gradveil.errors import UsageError, suggest
from gradveil.generators.base import NETWORKS

__all__ = ["SHIPPED", "cache_folder", "find_card", "load_network", "network_card", "save_network"]

SHIPPED = Path(__file__).parent / "weights"
FORMAT = "gradveil network 1"


def cache_folder() -> Path:
    """Return where networks are kept that this user trained or downloaded."""
    named = os.environ.get("GRADVEIL_CACHE")
    home = os.environ.get("XDG_CACHE_HOME")
    root = Path(named) if named else (Path(home) if home else Path.home() / ".cache") / "gradveil"
    return root.expanduser() / "networks"


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


def network_card(name_or_path: str) -> dict[str, Any]:
    """Return the card of trained weights: data, licence, seed, metrics, hash."""
    return _read_card(find_card(name_or_path))


def find_card(name_or_path: str) -> Path:
    """Return the card of a network, by name or path.

    Raises:
        UsageError: There is no such network, or its weights are not here, with the command that makes them.
    """
    text = name_or_path.strip()
    if Path(text).suffix in (".safetensors", ".json") or os.sep in text:
        card = Path(text).expanduser().with_suffix(".json")
        if not card.is_file():
            raise UsageError(f"there is no card {str(card)!r} beside the weights; give the two files `gradveil pretrain` writes")
        return card
    if text not in NETWORKS.names():
        raise UsageError(f"there is no network called {text!r}{suggest(text, NETWORKS.names())}")
    found = next((folder / f"{text}.json" for folder in (SHIPPED, cache_folder()) if (folder / f"{text}.json").is_file()), None)
    if found is None:
        raise UsageError(
            f"the weights of {text!r} are not on this machine; make them with `gradveil pretrain {text} --data DATA`"
        )
    return found


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
    card = _read_card(Path(card_path))
    tensors = _verified(Path(card_path).with_suffix(".safetensors"), str(card["sha256"]), sha256)
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


def _read_card(path: Path) -> dict[str, Any]:
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the card {str(path)!r} ({error}); train or download the network again") from error
    if not isinstance(card, dict) or card.get("format") != FORMAT or not {"network", "sha256"} <= set(card):
        raise UsageError(f"{str(path)!r} is no card of a network; give the one `gradveil pretrain` wrote")
    return card


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
        tensors = load(content)
    except SafetensorError as error:
        raise UsageError(f"the weights {str(path)!r} are no safetensors file ({error}); train or download them again") from error
    if not all(bool(torch.isfinite(value).all()) for value in tensors.values() if value.is_floating_point()):
        raise UsageError(f"the weights {str(path)!r} hold numbers that are not finite; train or download them again")
    return tensors
