"""Pack the weights of a trained network as they ship, and note on its card what that changes.

    python -m scripts.pack_network CARD.json [--levels 256]

Without ``--levels`` every bit is kept. With it matrices are kept in fixed point, and the network is refused if its pictures
change by more than half precision may change them (`scripts.pretraining.pretraining.MOST_CHANGE`).
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import torch

from gradveil.errors import UsageError
from gradveil.networks.base import NETWORKS
from gradveil.networks.cards import read_card, weights_beside
from gradveil.networks.packing import pack, unpack
from gradveil.networks.store import load_network
from gradveil.randomness import Seed
from gradveil.storage.files import json_bytes, write_whole
from scripts.pretraining.pretraining import MOST_CHANGE, probes


def pack_network(path: Path, levels: int | None) -> Path:
    """Write packed weights beside a card, take away those that were there, and return the new file."""
    card, old, network = read_card(path), weights_beside(path), load_network(str(path))
    method = NETWORKS.card(str(card["network"]))
    content = pack(network.state_dict(), levels=levels)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    codes = probes(method, network, Seed(0))
    with torch.no_grad():
        wanted = network(codes)
        network.load_state_dict({name: value.to(before[name].dtype) for name, value in unpack(content).items()})
        change = float((network(codes) - wanted).square().mean().sqrt())
    if levels is not None and change > MOST_CHANGE[method.family]:
        raise UsageError(
            f"packing changes what {path.stem!r} answers by {change:.5f}, more than {MOST_CHANGE[method.family]:.5f}"
        )
    card["precision"] = "float16" if levels is None else f"fixed point, {levels} steps per standard deviation"
    card["metrics"]["packing_changes_by"] = change
    card |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    new = path.with_suffix(".safetensors.xz")
    write_whole(new, content)
    write_whole(path, json_bytes(card))
    if old != new:
        old.unlink()
    return new


def main() -> None:
    """Pack what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("card", type=Path)
    parser.add_argument("--levels", type=int)
    asked = parser.parse_args()
    try:
        made = pack_network(asked.card, asked.levels)
    except UsageError as error:
        raise SystemExit(str(error)) from error
    print(f"{made}: {made.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
