"""A study that a script measures: stopped, continued, packed with its tables; and whatever is wrong with one is a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradveil.cli import main
from gradveil.errors import UsageError
from gradveil.report.study_tables import fill_studies
from gradveil.run.scripted import place_settings, run_scripted, tables_of
from gradveil.storage.study_file import read_study
from gradveil.study.published import ScriptedStudy, Study, load_study

Captured = pytest.CaptureFixture[str]
TEXT = """
[study]
title = "squares"
page = "docs/squares.md"
notes = "of small numbers"
script = "squares.py"

[settings]
data = "numbers.txt"
seed = 3
most = 3
"""
HELPER = "def square(number):\n    return number * number\n"
SCRIPT = """
from pathlib import Path
from mine.helper import square

def units(settings):
    return [f"part/{n}" for n in range(settings.most)]

def measure(unit, settings, work):
    number = int(unit[5:])
    if number == 1 and Path("stop").exists():
        raise KeyboardInterrupt
    with open("log", "a") as log:
        log.write(unit + "\\n")
    return {"number": number, "square": square(number) + len(Path(settings.data).read_text())}

def tables(documents):
    rows = [f"| {each['number']} | {each['square']} |" for each in documents.values()]
    return {"all": "\\n".join(["| n | n² |", "|---|---|", *rows]), "last": rows[-1]}
"""


@pytest.fixture
def squares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a scripted study in a folder ``mine``; the test runs beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, text in {"squares.toml": TEXT, "squares.py": SCRIPT, "helper.py": HELPER, "numbers.txt": ""}.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder / "squares.toml"


def done() -> list[str]:
    return Path("log").read_text().split() if Path("log").exists() else []


def test_stopped_continued_and_shown(squares: Path, capsys: Captured) -> None:
    command = ["study", "run", str(squares), "--quiet"]
    Path("stop").touch()
    assert main(command) == 130
    assert done() == ["part/0"]
    assert not Path("results").exists()
    Path("stop").unlink()
    assert main(command) == 0
    assert done() == ["part/0", "part/1", "part/2"], "what is done was measured again, or something was left out"
    content = read_study(Path("results/squares.json.xz"))
    assert content["documents"]["part/2.json"] == {"number": 2, "square": 4}
    assert content["settings"] == {"data": "numbers.txt", "seed": 3, "most": 3}
    assert {"code", "script", "commit", "platform", "cores", "torch"} <= content["provenance"].keys()
    assert content["provenance"]["seed"] == 3
    assert str(squares.parent) not in str(content)

    capsys.readouterr()
    assert main(["study", "table", "results/squares.json.xz"]) == 0
    shown = capsys.readouterr().out
    assert "**all**" in shown and "| 2 | 4 |" in shown and "of small numbers" in shown
    page = "<!-- study: squares#last -->\nold\n<!-- end -->\n"
    assert fill_studies(page, Path("results")) == "<!-- study: squares#last -->\n| 2 | 4 |\n<!-- end -->\n"
    with pytest.raises(UsageError, match="has no table 'least'"):
        fill_studies(page.replace("last", "least"), Path("results"))
    assert main(["report", "results/squares.json.xz"]) == 2


@pytest.mark.parametrize("changed", ["settings", "data", "helper"])
def test_a_change_measures_anew(squares: Path, changed: str) -> None:
    assert main(["study", "run", str(squares), "--quiet"]) == 0
    if changed == "settings":
        squares.write_text(TEXT.replace("seed = 3", "seed = 4"))
    elif changed == "data":
        (squares.parent / "other.txt").write_text("12")
    else:
        (squares.parent / "helper.py").write_text("# another\n" + HELPER)
    given = ["--data", str(squares.parent / "other.txt")] if changed == "data" else []
    assert main(["study", "run", str(squares), "--quiet", *given]) == 0
    assert len(done()) == 6


def test_processes_give_the_same(squares: Path) -> None:
    study = place_settings(load_scripted(squares))
    one = read_study(run_scripted(study, work=Path("a"), out=Path("a.json.xz")))
    two = read_study(run_scripted(study, work=Path("b"), out=Path("b.json.xz"), workers=2))
    assert one["documents"] == two["documents"] and one["tables"] == two["tables"]


def load_scripted(file: Path) -> ScriptedStudy:
    found = load_study(file)
    assert isinstance(found, ScriptedStudy)
    return found


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("def units", "def parts", r"has no 'units'"),
        ("from mine.helper", "from mine.nothing", r"cannot import .*squares\.py"),
        ("return {", "return {1}, {", r"measure\('part/0'\) must return plain values"),
        ("int(unit[5:])", "int(unit)", r"measure\('part/0'\) failed with ValueError: invalid literal"),
        ("settings.most)", "settings.least)", r"units\(\) failed with AttributeError"),
        ("range(settings.most)", "range(0)", r"must name at least one unit"),
        ('return {"all"', "return {1", r"tables\(\) must return Markdown"),
        ("each['square']", "each['cube']", r"tables\(\) failed with KeyError: 'cube'"),
        ("def tables(documents):", "def tables(documents:", r"cannot import .*SyntaxError"),
    ],
)
def test_a_wrong_script_is_one_sentence(squares: Path, capsys: Captured, old: str, new: str, sentence: str) -> None:
    (squares.parent / "squares.py").write_text(SCRIPT.replace(old, new))
    assert main(["study", "run", str(squares), "--quiet"]) == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told
    with pytest.raises(UsageError, match=sentence):
        run_scripted(place_settings(load_scripted(squares)), work=Path("w"), out=Path("r.json.xz"))


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('"squares.py"', '"../squares.py"', "name a Python file beside the study"),
        ("[settings]", "[grid]", r"a scripted study has no \[grid\]"),
        ('title = "squares"', 'table = "attacks"', r"a scripted study has no \[study.table\]"),
        ("[settings]", "[other]", r"has no \[other\]"),
        ("page = ", "pages = ", "has no key 'pages'"),
    ],
)
def test_a_wrong_file_is_one_sentence(squares: Path, old: str, new: str, sentence: str) -> None:
    squares.write_text(TEXT.replace(old, new))
    with pytest.raises(UsageError, match=sentence):
        load_study(squares)


def test_files_must_be_there(squares: Path) -> None:
    (squares.parent / "numbers.txt").unlink()
    with pytest.raises(UsageError, match=r"numbers\.txt' for data; say where it is with --data"):
        run_scripted(place_settings(load_scripted(squares)), work=Path("w"), out=Path("r.json.xz"))
    (squares.parent / "squares.py").unlink()
    with pytest.raises(UsageError, match="there is no file"):
        tables_of(load_scripted(squares), {})
    with pytest.raises(UsageError, match="has no plan"):
        Study.from_toml(squares)
