"""Train the networks that ship with the package, where the command line's own needs (typer, rich) are not installed.

    PYTHONPATH=src python scripts/pretrain_networks.py evaluation-32 --data FOLDER --minutes 4 --out OUT

FOLDER holds the public data by the names below. `gradveil pretrain` does the same for one network and any data.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from gradveil.generators.pretraining import default_settings, pretrain
from gradveil.generators.training import Progress

PHOTOGRAPHS = "Tiny-ImageNet: ImageNet's terms, research use"
X_RAYS = "PneumoniaMNIST: CC BY 4.0; COVID chest X-ray collection: CC BY, one CC BY-SA"
PLANS = {
    "evaluation-32": (("tinyimagenet_20c.zip",), PHOTOGRAPHS),
    "dcgan-32": (("tinyimagenet_20c.zip",), PHOTOGRAPHS),
    "style-32": (("tinyimagenet_20c.zip",), PHOTOGRAPHS),
    "style-64": (("tinyimagenet_20c.zip",), PHOTOGRAPHS),
    "style-32-grey": (("pneumoniamnist.npz", "covid_cxr_224.zip"), X_RAYS),
    "style-64-grey": (("pneumoniamnist.npz", "covid_cxr_224.zip"), X_RAYS),
}
LONGEST = 1_000_000
PICTURES = 5416  # of Tiny-ImageNet, after a tenth is kept back
LINE_EVERY = 10.0


def main() -> None:
    """Train one network within a number of minutes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(PLANS))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--paper", action="store_true", help="evaluation-32 by the paper's recipe: 20 passes, Adam at 1e-4")
    asked = parser.parse_args()
    files, licence = PLANS[asked.name]
    extra: dict[str, Any] = {"batch": asked.batch} if asked.batch else {}
    if asked.paper:
        extra = {"batch": 128, "learning_rate": 1e-4, "steps": 20 * 11 * (PICTURES // 128)}
    settings = default_settings(
        asked.name, device=asked.device, minutes=asked.minutes, seed=asked.seed, **{"steps": LONGEST, **extra}
    )
    last = [0.0]

    def tell(progress: Progress) -> None:
        if time.monotonic() - last[0] < LINE_EVERY and progress.done < 1:
            return
        last[0] = time.monotonic()
        losses = " ".join(f"{name} {value:.4f}" for name, value in progress.losses.items())
        sys.stderr.write(f"{asked.name}: {progress.done:.0%} step {progress.step} {progress.seconds:.0f} s {losses}\n")
        sys.stderr.flush()

    made = pretrain(
        asked.name, [str(asked.data / file) for file in files], settings, asked.out, licence=licence, on_progress=tell
    )
    sys.stdout.write(json.dumps({"card": str(made.card), "steps": made.steps, "metrics": made.metrics}) + "\n")


if __name__ == "__main__":
    main()
