"""Run the app in one process's children, without a network: ``python simulate.py [NODES]``.

Ray asks cloud machines for who they are whenever it starts, unless a certain file lies in the home folder; so home is a folder of
ours here. What the nodes keep goes there too.
"""

import os
import sys
import tempfile
from pathlib import Path

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def main(nodes: int) -> None:
    """Simulate with as many nodes."""
    home = Path(os.environ.get("GRADVEIL_HOME") or tempfile.mkdtemp())
    (home / "ray_bootstrap_config.yaml").write_text("{}\n", encoding="utf-8")
    os.environ.update(QUIET, HOME=str(home), FLWR_HOME=str(home / "flwr"), GRADVEIL_HOME=str(home))
    from flwr.simulation import run_simulation

    from digits_app.client_app import app as client
    from digits_app.server_app import app as server

    run_simulation(server, client, num_supernodes=nodes, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}})


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
