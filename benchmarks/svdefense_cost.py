"""What SVDefense costs a client: one epoch of local training with it over one without, in one run.

The whole client is timed, training and encoding. Rounds are interleaved and the fastest of each is taken, so that a busy machine
harms both alike. Where others use the same processor even that is not enough; ``--clock cpu`` counts the time this process ran.

    python benchmarks/svdefense_cost.py --images 100 --batch 32
    OMP_NUM_THREADS=1 python benchmarks/svdefense_cost.py --images 100 --batch 32 --clock cpu
    python benchmarks/svdefense_cost.py --images 500 --batch 32 --device cuda --rounds 10
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from gradveil.client.update import run_client
from gradveil.defenses import Defense, build_defense
from gradveil.learning import Learner, loss_by_name
from gradveil.models import build_model
from gradveil.randomness import Seed
from gradveil.records import Batch
from gradveil.study.local_training import TrainingSettings
from gradveil.wire import tensor_bytes

SHAPE, CLASSES = (3, 32, 32), 10
LIMIT = 1.15


def seconds(learner: Learner, batch: Batch, defense: Defense, clock: Callable[[], float]) -> tuple[float, int]:
    """Return the time of one client and the bytes it sends."""
    started = clock()
    payload = run_client(learner, batch, defense, Seed(0)).payload
    if batch.inputs.is_cuda:
        torch.cuda.synchronize()
    return clock() - started, tensor_bytes(payload)


def main() -> int:
    """Measure, print one line per defense, and tell whether the limit is kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=100, help="records of the client")
    parser.add_argument("--batch", type=int, default=32, help="records per step")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved repetitions; the fastest counts")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--defense", nargs="*", default=["svdefense", "svdefense(hardened=True)"])
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()

    device, clock = torch.device(options.device), time.process_time if options.clock == "cpu" else time.perf_counter
    model = build_model(options.model, input_shape=SHAPE, classes=CLASSES, seed=Seed(0))
    settings = TrainingSettings(shares="weights", epochs=1, minibatch=options.batch, learning_rate=0.01)
    learner = Learner.of(model, loss_by_name("cross_entropy"), settings).to(device)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand((options.images, *SHAPE), generator=generator).to(device)
    batch = Batch(inputs, torch.randint(CLASSES, (options.images,), generator=generator).to(device))

    spellings = ["none", *options.defense]
    best = dict.fromkeys(spellings, float("inf"))
    sent: dict[str, int] = {}
    seconds(learner, Batch(batch.inputs[:1], batch.targets[:1]), build_defense(spellings[-1]), clock)
    for _ in range(options.rounds):
        for spelling in spellings:
            took, sent[spelling] = seconds(learner, batch, build_defense(spelling), clock)
            best[spelling] = min(best[spelling], took)
    rows = [
        {
            "defense": spelling,
            "seconds": round(best[spelling], 4),
            "ratio": round(best[spelling] / best["none"], 4),
            "bytes_up": sent[spelling],
            "share_of_dense": round(sent[spelling] / sent["none"], 4),
        }
        for spelling in spellings
    ]
    for row in rows:
        print(f"{row['defense']:34} {row['seconds']:9.3f} s   x {row['ratio']:.3f}   {row['share_of_dense']:7.2%} of the bytes")
    kept = rows[1]["ratio"] <= LIMIT if len(rows) > 1 else True
    print(f"limit x {LIMIT}: {'kept' if kept else 'broken'}")
    if options.out:
        machine = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
        figures = {
            "model": options.model,
            "images": options.images,
            "batch": options.batch,
            "rounds": options.rounds,
            "clock": options.clock,
            "device": options.device,
            "machine": machine,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "limit": LIMIT,
            "rows": rows,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
