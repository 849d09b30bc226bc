"""What a step of the shadow defense costs, before and after its termination round, over an undefended one.

    OMP_NUM_THREADS=1 python benchmarks/shadow_cost.py --model lenet --batch 1 8 32

Best of many, in turns, in CPU time of the process where there is no GPU, so that other work on the machine harms neither side.
Latent codes are fitted before the clock starts. The gate: at most 4 after termination.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable

import torch

from gradveil import __version__
from gradveil.client.local_training import LocalTraining
from gradveil.client.update import run_client
from gradveil.data import load_data
from gradveil.defenses import Defense, build_defense
from gradveil.learning import Learner, loss_by_name
from gradveil.models import build_model
from gradveil.randomness import Seed
from gradveil.records import Batch
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named

GATE = 4.0


def clock(device: str) -> Callable[[], float]:
    """Return a clock: CPU time of this process, or the time until the GPU is idle."""
    if device == "cpu":
        return time.process_time

    def waited() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return waited


def measured(learner: Learner, batch: Batch, device: str, repeats: int) -> dict[str, float]:
    """Return milliseconds of one client's step: undefended, after and before termination."""
    defense, none, now = build_defense("shadow(latent_steps=1)"), build_defense("none"), clock(device)

    def one(chosen: Defense, state: Named, round_index: int) -> float:
        begun = now()
        run_client(learner, batch, chosen, Seed(0), state=state, round_index=round_index, local=LocalTraining())
        return 1000 * (now() - begun)

    state = run_client(learner, batch, defense, Seed(0), local=LocalTraining()).state
    best = {"undefended": float("inf"), "after": float("inf"), "before": float("inf")}
    for repeat in range(repeats):
        best["undefended"] = min(best["undefended"], one(none, {}, 20))
        best["after"] = min(best["after"], one(defense, state, 20))
        if repeat < max(2, repeats // 10):
            best["before"] = min(best["before"], one(defense, state, 19))
    return best


def main() -> None:
    """Measure and print one JSON object per batch size; exit with 1 beyond the gate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="photos")
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--batch", type=int, nargs="+", default=(1, 8, 32))
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    data = load_data(options.data)
    model = build_model(options.model, input_shape=data.input_shape, classes=data.classes, seed=Seed(0))
    settings = TrainingSettings(shares="weights", local_steps=1)
    learner = Learner.of(model, loss_by_name("cross_entropy"), settings).to(torch.device(options.device))
    worst = 0.0
    for size in options.batch:
        drawn = data.batch([place * (len(data) // size) for place in range(size)])
        batch = drawn.replace(inputs=drawn.inputs.to(options.device), targets=drawn.targets.to(options.device))
        best = measured(learner, batch, options.device, options.repeats)
        ratios = {f"{name}_ratio": round(best[name] / best["undefended"], 2) for name in ("after", "before")}
        worst = max(worst, ratios["after_ratio"])
        head = {"version": __version__, "data": options.data, "model": options.model, "device": options.device, "batch": size}
        times = {f"{name}_ms": round(value, 3) for name, value in best.items()}
        sys.stdout.write(json.dumps({**head, "threads": torch.get_num_threads(), **times, **ratios}) + "\n")
    sys.exit(worst > GATE)


if __name__ == "__main__":
    main()
