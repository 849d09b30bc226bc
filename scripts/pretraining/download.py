"""Networks from an address the user gives, into the user's cache folder; verified before they are kept."""

from __future__ import annotations

import hashlib
import json
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from gradveil.errors import UsageError
from gradveil.networks.base import NETWORKS
from gradveil.networks.store import load_network
from gradveil.storage.files import write_whole

__all__ = ["download_network"]

MOST_BYTES = 256 * 2**20
SECONDS = 60.0


def download_network(name: str, url: str, folder: Path, *, sha256: str | None = None) -> Path:
    """Fetch the weights at ``url`` and the card beside them, verify both, and return the card's path.

    Args:
        name: The registered network they are for; the card must say the same.
        url: Address of the ``.safetensors`` file, https or file; the card has the same address with ``.json``.
        folder: Where they go.
        sha256: What the weights must hash to. Without it the card is trusted, which comes from the same address.

    Raises:
        UsageError: In one sentence; nothing is left in the folder that was not there.
    """
    NETWORKS.card(name)
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("https", "file") or not parts.path.endswith(".safetensors"):
        raise UsageError(f"{url!r} is no https or file address of a .safetensors file; give one, its card beside it as .json")
    card_url = urllib.parse.urlunsplit(parts._replace(path=parts.path.removesuffix(".safetensors") + ".json"))
    weights, card = _fetch(url), _fetch(card_url)
    _check(name, url, weights, card, sha256)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    if path.exists():
        raise UsageError(f"{str(path)!r} is there already; remove it and its weights first, or name another folder with --out")
    write_whole(path.with_suffix(".safetensors"), weights)
    write_whole(path, card)
    try:
        load_network(str(path), sha256=sha256)
    except UsageError:
        path.unlink()
        path.with_suffix(".safetensors").unlink()
        raise
    return path


def _fetch(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=SECONDS) as answer:
            content: bytes = answer.read(MOST_BYTES + 1)
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise UsageError(f"cannot download {url!r} ({getattr(error, 'reason', error)}); check the address") from error
    if len(content) > MOST_BYTES:
        raise UsageError(f"{url!r} is larger than {MOST_BYTES // 2**20} MiB; that is no network of this package")
    return content


def _check(name: str, url: str, weights: bytes, card: bytes, sha256: str | None) -> None:
    try:
        told = json.loads(card)
        described, promised = str(told["network"]), str(told["sha256"])
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"the card beside {url!r} cannot be read; ask whoever made it for the one `python -m scripts.pretrain` wrote"
        ) from error
    if described != name:
        raise UsageError(f"{url!r} is a network {described!r}, not {name!r}; ask for it by its own name")
    found = hashlib.sha256(weights).hexdigest()
    wrong = next((each for each in (promised, sha256) if each is not None and found != each.lower()), None)
    if wrong is not None:
        raise UsageError(f"what came from {url!r} has SHA-256 {found[:12]}…, not {wrong[:12]}…; it is damaged or another file")
