"""The gate of the foundation: ``standard`` on the built-in photos, sigmoid and ReLU LeNet, undefended, on a CPU.

python benchmarks/standard_photos.py --out results/first_light_photos
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gradveil.run.describe import describe_cells
from gradveil.run.pool import run_cells
from gradveil.study.cell import Cell


def main() -> None:
    """Run both cells and print what the gate asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    cells = [Cell(model=m, records=options.records, ensemble="standard") for m in ("lenet", 'lenet(activation="relu")')]
    command = "python benchmarks/standard_photos.py"
    result = run_cells(
        cells, options.out, lambda keys: describe_cells(cells, keys, command, "standard on photos"), workers=options.workers
    )
    for cell in result.cells:
        found, bar = cell.selected.psnr, cell.bar.psnr
        assert found is not None and bar is not None
        sys.stdout.write(
            f"{cell.settings['model']}: identified {cell.selected.identified.count} of {cell.n}, "
            f"median PSNR {found.median:.1f} dB (best null {bar.value:.1f} dB)\n"
        )


if __name__ == "__main__":
    main()
