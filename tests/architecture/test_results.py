"""Every published file of results can be read, is told of, holds what its study says, and names nobody's machine."""

from __future__ import annotations

import itertools
import lzma
import re
from pathlib import Path

import pytest

from gradveil.report.study_tables import table_of_studies
from gradveil.run.ladders import expand_defense
from gradveil.storage.study_file import as_folder, read_study, write_study
from gradveil.study.load import load_run
from gradveil.study.published import BEFORE, Study, load_study
from scripts.generate import PAGES, RESULTS, ROOT, STUDIES
from tests.architecture.test_project import foreign_names

FILES = sorted(RESULTS.glob("*.json.xz"))
Point = tuple[str, str, str, int, int, int, int, int]


def family(ensemble: str) -> str:
    """Return an ensemble's name without its version: some rows were run by the next one, which was the same there."""
    return re.sub(r"-\d+$", "", ensemble)


def whole(defense: str) -> str:
    """Return the spelling with all settings: published cells have it, older ones as it was asked for."""
    (spelling,) = expand_defense(defense)
    return spelling


def planned(study: Study) -> set[Point]:
    """Return what a study asks for, without looking for its files."""
    return {
        (model, whole(defense), family(ensemble), size, steps, plan.records, plan.steps, plan.seed)
        for plan in study.plans
        for model, defense, ensemble, size, steps in itertools.product(
            plan.model, plan.defense, plan.ensemble, plan.batch_size, plan.local_steps
        )
    }


def test_results_are_study_files_alone_and_all_are_told_of() -> None:
    assert len(FILES) > 20
    assert sorted(RESULTS.iterdir()) == sorted([*FILES, RESULTS / "README.md"])
    told = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `(\w+)`", told, re.MULTILINE)) == [path.name.removesuffix(".json.xz") for path in FILES]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.removesuffix(".json.xz"))
def test_every_file_can_be_read(path: Path, tmp_path: Path) -> None:
    content = read_study(path)
    assert path.name == f"{content['name']}.json.xz"
    assert content.get("cells") or content["documents"] or content["trainings"]
    known = content["provenance"]
    assert known == BEFORE or known["code"]
    marked = re.search(rf"^\| `{content['name']}` †", (RESULTS / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert bool(marked) == (known == BEFORE)
    assert list(foreign_names(lzma.decompress(path.read_bytes()).decode("utf-8"))) == []
    assert lzma.decompress(write_study(tmp_path / path.name, content).read_bytes()) == lzma.decompress(path.read_bytes())
    if content.get("cells"):
        with as_folder(path) as folder:
            found = load_run(folder)
        assert len(found.cells) == len(content["cells"])
        assert found.notes == ()


@pytest.mark.parametrize("file", sorted(STUDIES.glob("*.toml")), ids=lambda file: file.stem)
def test_a_study_asks_for_what_its_results_hold(file: Path) -> None:
    study, path = load_study(file), RESULTS / f"{file.stem}.json.xz"
    if not path.is_file():
        pytest.skip("not run yet")
    if not isinstance(study, Study):
        pytest.skip("a script says what is asked for")
    content = read_study(path)
    sizes = ("batch_size", "local_steps", "records", "steps", "seed")
    found = {
        (c["model"], whole(c["defense"]), family(c["ensemble"]), *(c.get(name, 0) for name in sizes))
        for c in (cell["cell"] for cell in content.get("cells", []))
    }
    # A cell that is kept as a document is asked for too, by one of the grids.
    assert found == planned(study) or (content["documents"] and found < planned(study)) or not study.attacks
    if not study.attacks:
        trained = {each["settings"]["defense"] for each in content["documents"].values()}
        assert trained == set(study.plan.defense)


def test_the_front_page_quotes_the_results() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| (\w+)[^|]*\| (\d+ of 128 \(.*?\)) \| (\d+ of 128 \(.*?\))", readme, re.MULTILINE)
    assert len(quoted) >= 5
    rows = table_of_studies([read_study(RESULTS / "update_defenses_lenet_cifar10_128.json.xz")]).splitlines()
    for name, plain, informed in quoted:
        own = [row.split(" | ") for row in rows if row.startswith(f"| {name}")]
        assert (plain, informed) in [(row[2], row[4]) for row in own], name


def test_files_that_pages_name_are_there() -> None:
    named = re.compile(r"(?:studies/\w+\.(?:toml|py)|benchmarks/\w+\.py|results/\w+\.json(?:\.xz)?)")
    pages = [*PAGES, RESULTS / "README.md", ROOT / "CONTRIBUTING.md"]
    missing = {name for page in pages for name in named.findall(page.read_text(encoding="utf-8")) if not (ROOT / name).is_file()}
    assert missing <= {"studies/NAME.toml", "results/NAME.json.xz"}
