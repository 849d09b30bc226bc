"""What a step of the shadow defense costs, before and after its termination round, over an undefended one.

    python -m benchmarks.shadow_cost --model lenet --batch 1 8 32

Latent codes are fitted before the clock starts. The gate: at most 4 after termination.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from benchmarks.harness import Timer, arguments, finish, read
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


def measured(learner: Learner, batch: Batch, device: str, repeats: int, clock: str) -> dict[str, float]:
    """Return milliseconds of one client's step: undefended, after and before termination."""
    defense, none = build_defense("shadow(latent_steps=1)"), build_defense("none")

    def one(chosen: Defense, state: Named, round_index: int) -> None:
        run_client(learner, batch, chosen, Seed(0), state=state, round_index=round_index, local=LocalTraining())

    state = run_client(learner, batch, defense, Seed(0), local=LocalTraining()).state
    timer = Timer(device, clock)
    for repeat in range(repeats):
        timer("undefended", lambda: one(none, {}, 20))
        timer("after", lambda: one(defense, state, 20))
        if repeat < max(2, repeats // 10):
            timer("before", lambda: one(defense, state, 19))
    return {name: 1000 * seconds for name, seconds in timer.best.items()}


def main() -> None:
    """Measure every batch size; exit with 1 beyond the gate."""
    parser = arguments(__doc__, rounds=40, clock="cpu")
    parser.add_argument("--data", default="photos")
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--batch", type=int, nargs="+", default=(1, 8, 32))
    options = read(parser)
    data = load_data(options.data)
    model = build_model(options.model, input_shape=data.input_shape, classes=data.classes, seed=Seed(0))
    settings = TrainingSettings(shares="weights", local_steps=1)
    learner = Learner.of(model, loss_by_name("cross_entropy"), settings).to(torch.device(options.device))
    rows = []
    for size in options.batch:
        drawn = data.batch([place * (len(data) // size) for place in range(size)])
        batch = drawn.replace(inputs=drawn.inputs.to(options.device), targets=drawn.targets.to(options.device))
        best = measured(learner, batch, options.device, options.rounds, options.clock)
        times = {f"{name}_ms": round(value, 3) for name, value in best.items()}
        ratios = {f"{name}_ratio": round(best[name] / best["undefended"], 2) for name in ("after", "before")}
        rows.append({"batch": size, **times, **ratios})
    finish("shadow_cost", {"data": Path(options.data).name, "model": options.model, "gate": GATE, "rows": rows}, options)
    sys.exit(max(row["after_ratio"] for row in rows) > GATE)


if __name__ == "__main__":
    main()
