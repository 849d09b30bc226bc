"""Audit built-in data from Python: what do updates give away without a defense, and what with one?

Run it: ``python examples/audit_builtin.py [FOLDER]``. The same on the command line, with all defaults, is ``gradveil audit``.
"""

import sys
import tempfile
from pathlib import Path

from gradveil import Plan, run_audit, write_report


def main(out: Path) -> None:
    plan = Plan.default(title="First steps").override(
        data="digits",
        model="mlp(hidden=32)",
        defense=["none", "gaussian_noise(std=0.3)"],
        records=8,
        steps=20,  # this and the short lists keep the example quick; leave both out for a real audit
        lists="32",
    )
    for cell in run_audit(plan, out, workers=1).cells:
        found = cell.identified
        print(
            f"{cell.defense.spelling}: {found.count} of {found.n} records identified (95 %: {found.low:.0%} to {found.high:.0%})"
        )
        for check in (*cell.failures, *cell.warnings):
            print(f"  {check.level}: {check.sentence}")
    print(f"report: {write_report(out)}")


if __name__ == "__main__":  # worker processes import this file again
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
