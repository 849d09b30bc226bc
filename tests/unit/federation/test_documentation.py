"""The example of docs/training.md runs as it is written, on smaller data and for one round."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "training.md"


def test_the_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    for written, small in (('"photos"', '"digits"'), ('"lenet"', '"mlp(hidden=8)"'), ("rounds=20", "rounds=1")):
        assert written in code
        code = code.replace(written, small)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code, names)  # our own document
    assert names["two"].settings.defense == "pruning(rate=0.9)" and (tmp_path / "pruned" / "training.json").is_file()
