"""What the defenses of `shadow_xray.py` cost in F1 and accuracy, in a training that learns something.

No study: F1 on one half of the test records, because the other half chose the settings; a plan takes all of them.

    python benchmarks/shadow_utility.py --data pneumoniamnist.npz --out FILE

Several seeds and no attack. The same hospitals train a small ConvNet with five local epochs of plain SGD, which SCAFFOLD needs.
Model and settings were chosen on the undefended run of seed 1 and one half of the test records; these figures are of other seeds
and the other half.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

import torch
from shadow_xray import FEDAVG, ROWS, load, settings

from gradveil import __version__
from gradveil.federation.engine import run_training

MODEL = Path(__file__).resolve().parents[1] / "studies" / "small_convnet.py"
EPOCHS = 5
CHEAP = "shadow(rounds={rounds}, until=1, latent_steps=10, fit_steps=1)"
"""The noise has the height of the paper's at every round; where it lies comes from fewer steps."""
ANSWERED = (
    FEDAVG,
    "SCAFFOLD",
    "noise",
    "GS",
    "GC",
    "Outpost",
    "CENSOR",
    "image noise, weak",
    "image noise, strong",
    "shadow",
)


def main() -> None:
    """Train every row with every seed, and write one JSON file; what it holds already is not repeated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="pneumoniamnist.npz")
    parser.add_argument("--rows", nargs="+", choices=tuple(ROWS), default=ANSWERED)
    parser.add_argument("--seeds", type=int, nargs="+", default=(2, 3, 4))
    parser.add_argument("--records", type=int, default=120)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--width", type=int, default=16, help="of the ConvNet")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.model, options.learning_rate, options.minibatch = f"{MODEL}:make(width={options.width})", 0.1, 8
    options.latent_steps, options.device, options.local_epochs = 10, "cpu", EPOCHS
    found = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    rows = found.get("rows", [])
    for seed in options.seeds:
        options.seed = seed
        data, test, _ = load(options)
        half = test.take(list(range(1, len(test), 2)))
        for row in options.rows:
            if any((each["row"], each["seed"]) == (row, seed) for each in rows):
                continue
            asked = settings(row, options)
            if row == "shadow":
                asked = dataclasses.replace(asked, defense=CHEAP.format(rounds=options.rounds))
            begun = time.process_time()
            result = run_training(asked, dataset=data, test=half)
            last = result.rounds[-1]
            rows.append(
                {
                    "row": row,
                    "seed": seed,
                    "defense": asked.defense,
                    "f1": last.f1,
                    "accuracy": last.accuracy,
                    "f1_by_round": [each.f1 for each in result.rounds if each.f1 is not None],
                    "client_seconds": round(sum(each.client_seconds or 0.0 for each in result.rounds), 3),
                    "cpu_seconds": round(time.process_time() - begun, 1),
                }
            )
            sys.stderr.write(json.dumps(rows[-1]) + "\n")
            told = {**asked.as_dict(), "data": Path(asked.data).name, "model": f"small_convnet(width={options.width})"}
            for name in ("defense", "seed", "aggregation"):
                told.pop(name)
            common = {
                "format": "gradveil-shadow-utility-1",
                "version": __version__,
                "torch": torch.__version__,
                "threads": torch.get_num_threads(),
                "settings": told,
                "options": {"records": options.records, "size": options.size, "tested_on": len(half)},
            }
            options.out.write_text(json.dumps({**common, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
