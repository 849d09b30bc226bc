"""What is written once stays written once: each rule says how a second copy would look, and which files may look so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.architecture.test_import_rules import ROOT, plant

ONCE: dict[str, tuple[str, set[str]]] = {
    "a step of Adam": (r"0\.999? ?\*\* ?|\.lerp\(|0\.001 \* ", {"learning/adam.py"}),
    "a file that is whole or not there": (r"\.part\"|os\.replace\(|TemporaryFile|mkstemp", {"storage/files.py"}),
    # A recording waits for the GPU without timing anything.
    "the best of several times": (r"cuda\.synchronize|min\(times", {"client/timing.py", "recording.py"}),
    "the answers among outputs": (r"\[0\] if isinstance\(\w+, tuple\)", {"learning/learner.py"}),
    # Two places ask where an update lies, not a learner.
    "the device of a learner": (
        r"(?<!update\.)weights\.values\(\)\)\)\.device",
        {"learning/learner.py"},
    ),
    # Settings of a federation wait to be rewritten; fields read what files of results hold.
    "what counts as a number": (
        r"isinstance\(\w+, bool\) (or|and)|(or|and) not isinstance\(\w+, bool\)|(or|and) isinstance\(\w+, bool\)",
        {"study/checks.py"},
    ),
    "intervals and tails of counts": (r"NormalDist|math\.comb\(", {"significance.py"}),
}
COPIES = {
    "a step of Adam": "square = 0.999 * square + 0.001 * slope.square()",
    "a file that is whole or not there": 'beside = path.with_name(f".{path.name}.part")',
    "the best of several times": "return Latency(min(times[0]), min(times[1]))",
    "the answers among outputs": "outputs = outputs[0] if isinstance(outputs, tuple) else outputs",
    "the device of a learner": "device = next(iter(learner.weights.values())).device",
    "what counts as a number": "number = isinstance(value, (int, float)) and not isinstance(value, bool)",
    "intervals and tails of counts": "z = NormalDist().inv_cdf(0.975)",
}


def copies(root: Path, what: str) -> set[str]:
    """Return the files of the package that hold a piece of logic and may not."""
    sign, homes = ONCE[what]
    package = root / "src" / "gradveil"
    found = {path.relative_to(package).as_posix() for path in package.rglob("*.py") if re.search(sign, path.read_text("utf-8"))}
    return found - homes


@pytest.mark.parametrize("what", ONCE)
def test_it_stands_in_one_place_and_a_copy_is_noticed(what: str, tmp_path: Path) -> None:
    assert copies(ROOT, what) == set()
    plant(tmp_path, {"src/gradveil/audit/copy.py": COPIES[what] + "\n"})
    assert copies(tmp_path, what) == {"audit/copy.py"}
