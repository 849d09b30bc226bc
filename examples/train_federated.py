"""Train one model three times, with paired seeds: undefended, pruned, and pruned with SCAFFOLD. What does the defense cost?

Run it: ``python examples/train_federated.py [FOLDER]``; stop it, run it again, and it continues. On the command line:
``gradveil train --data digits --model 'mlp(hidden=64)' --defense 'pruning(rate=0.9)' --partition 'dirichlet(alpha=0.5)'``.
"""

import sys
import tempfile
from pathlib import Path

from gradveil.federation import run_training
from gradveil.study.federation import FederationSettings


def main(folder: Path) -> None:
    plain = FederationSettings(
        data="digits",
        model="mlp(hidden=64)",
        partition="dirichlet(alpha=0.5)",
        clients=8,
        clients_per_round=4,
        rounds=12,
        local_epochs=2,
        learning_rate=0.2,
    )
    runs = {
        "undefended": plain,
        "pruned": plain.replace(defense="pruning(rate=0.9)"),
        "pruned, scaffold": plain.replace(defense="pruning(rate=0.9)", aggregation="scaffold"),
    }
    for name, settings in runs.items():
        result = run_training(settings, out=folder / name.replace(", ", "-"), latency=True)
        assert result.latency is not None and result.final_accuracy is not None
        sent = result.bytes.up_per_round / 1000
        print(f"{name}: accuracy {result.final_accuracy:.1%}, {sent:.1f} kB up per round, {result.latency.ratio:.2f}x the time")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
