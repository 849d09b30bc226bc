"""What SVDefense costs a client: one epoch of local training with it over one without, in one run.

The whole client is timed, training and encoding. Exit code 1 where the limit is broken.

    python -m benchmarks.svdefense_cost --images 100 --batch 32
    python -m benchmarks.svdefense_cost --images 100 --batch 32 --clock cpu
    python -m benchmarks.svdefense_cost --images 500 --batch 32 --device cuda --rounds 10
"""

from __future__ import annotations

import sys
from functools import partial

import torch

from benchmarks.harness import arguments, finish, in_turns, read
from gradveil.client.update import run_client
from gradveil.defenses import build_defense
from gradveil.learning import Learner, loss_by_name
from gradveil.models import build_model
from gradveil.randomness import Seed
from gradveil.records import Batch
from gradveil.study.local_training import TrainingSettings
from gradveil.wire import tensor_bytes

SHAPE, CLASSES = (3, 32, 32), 10
LIMIT = 1.15


def sent(learner: Learner, batch: Batch, spelling: str) -> int:
    """Run one client and return the bytes it sends."""
    return tensor_bytes(run_client(learner, batch, build_defense(spelling), Seed(0)).payload)


def main() -> int:
    """Measure, and tell whether the limit is kept."""
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--images", type=int, default=100, help="records of the client")
    parser.add_argument("--batch", type=int, default=32, help="records per step")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--defense", nargs="*", default=["svdefense", "svdefense(hardened=True)"])
    options = read(parser)
    device = torch.device(options.device)
    model = build_model(options.model, input_shape=SHAPE, classes=CLASSES, seed=Seed(0))
    settings = TrainingSettings(shares="weights", epochs=1, minibatch=options.batch, learning_rate=0.01)
    learner = Learner.of(model, loss_by_name("cross_entropy"), settings).to(device)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand((options.images, *SHAPE), generator=generator).to(device)
    batch = Batch(inputs, torch.randint(CLASSES, (options.images,), generator=generator).to(device))

    spellings = ["none", *options.defense]
    up = {spelling: sent(learner, batch, spelling) for spelling in spellings}
    ways = {spelling: partial(sent, learner, batch, spelling) for spelling in spellings}
    best = in_turns(ways, device, rounds=options.rounds, clock=options.clock)
    rows = [
        {
            "defense": spelling,
            "seconds": round(best[spelling], 4),
            "ratio": round(best[spelling] / best["none"], 4),
            "bytes_up": up[spelling],
            "share_of_dense": round(up[spelling] / up["none"], 4),
        }
        for spelling in spellings
    ]
    kept = best[spellings[1]] <= LIMIT * best["none"] if len(rows) > 1 else True
    asked = {name: getattr(options, name) for name in ("model", "images", "batch")}
    finish("svdefense_cost", {**asked, "limit": LIMIT, "kept": kept, "rows": rows}, options)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
