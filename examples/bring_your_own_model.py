"""Audit a model and data of your own: a factory in a file, and an ``.npz`` with ``x`` in [0, 1] and ``y``.

Run it: ``python examples/bring_your_own_model.py [FOLDER]``. The same on the command line:
``gradveil audit --data scans.npz --model bring_your_own_model.py:make_model --defense none``.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
from torch import nn

from gradveil import Plan, run_audit, write_report


def make_model(classes: int) -> nn.Module:
    """Return any module that maps inputs to logits; ``classes`` and ``input_shape`` are handed in where it asks for them."""
    return nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.Sigmoid(), nn.Flatten(1), nn.Linear(8 * 5 * 5, classes))


def main(folder: Path) -> None:
    data = folder / "scans.npz"
    scans = np.random.default_rng(0).random((150, 12, 12))
    np.savez(data, x=scans.astype(np.float32), y=np.arange(150) % 3)

    plan = Plan.default(data=str(data), model=f"{__file__}:make_model", defense="none", records=4, steps=50)
    run = run_audit(plan, folder / "results", workers=1)
    cell = run.cells[0]
    print(f"{cell.identified.count} of {cell.identified.n} records identified among {cell.candidates}")
    print(f"report to share, without pictures: {write_report(run.out)}")
    print(f"report to keep inside: {write_report(run.out, private=True)}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
