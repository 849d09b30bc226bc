"""What is known of trained networks, found by name or path; nothing here needs torch.

A name is looked for among the weights that ship with the package, then in the user's cache folder (``GRADVEIL_CACHE``, else
``~/.cache/gradveil``), where ``python -m scripts.pretrain`` puts what it trains or downloads. A path names the weights or the
card beside them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from gradveil.errors import UsageError, suggest
from gradveil.registry import indexed

__all__ = ["FORMAT", "SHIPPED", "cache_folder", "find_card", "network_card", "read_card", "weights_beside"]

SHIPPED = Path(__file__).parent / "weights"
FORMAT = "gradveil network 1"


def cache_folder() -> Path:
    """Return where networks are kept that this user trained or downloaded."""
    named = os.environ.get("GRADVEIL_CACHE")
    home = os.environ.get("XDG_CACHE_HOME")
    root = Path(named) if named else (Path(home) if home else Path.home() / ".cache") / "gradveil"
    return root.expanduser() / "networks"


def network_card(name_or_path: str) -> dict[str, Any]:
    """Return the card of trained weights: data, licence, seed, metrics, hash."""
    return read_card(find_card(name_or_path))


def find_card(name_or_path: str) -> Path:
    """Return the card of a network, by name or path.

    Raises:
        UsageError: There is no such network, or its weights are not here, with the command that makes them.
    """
    text = name_or_path.strip().removesuffix(".xz")
    if Path(text).suffix in (".safetensors", ".json") or os.sep in text:
        card = Path(text).expanduser().with_suffix(".json")
        if not card.is_file():
            raise UsageError(
                f"there is no card {str(card)!r} beside the weights; give the two files `python -m scripts.pretrain` writes"
            )
        return card
    known = indexed("network")
    if text not in known:
        raise UsageError(f"there is no network called {text!r}{suggest(text, known)}")
    found = next((folder / f"{text}.json" for folder in (SHIPPED, cache_folder()) if (folder / f"{text}.json").is_file()), None)
    if found is None:
        raise UsageError(
            f"the weights of {text!r} are not on this machine; make them with `python -m scripts.pretrain {text} --data DATA`"
        )
    return found


def weights_beside(card: Path) -> Path:
    """Return where the weights of a card are: packed, as those that ship, or plain, as everything that is trained here."""
    packed = card.with_suffix(".safetensors.xz")
    return packed if packed.is_file() else card.with_suffix(".safetensors")


def read_card(path: Path) -> dict[str, Any]:
    """Return the content of a card, or raise one sentence."""
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the card {str(path)!r} ({error}); train or download the network again") from error
    if not isinstance(card, dict) or card.get("format") != FORMAT or not {"network", "sha256"} <= set(card):
        raise UsageError(f"{str(path)!r} is no card of a network; give the one `python -m scripts.pretrain` wrote")
    return card
