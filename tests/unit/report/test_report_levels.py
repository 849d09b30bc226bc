"""The first screen says what an attacker gets at each level, how strong that attacker was shown to be, and what was not tried."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradveil.cli import main
from gradveil.report import render, write_report
from gradveil.study.levels import Listed, ListLevel, Reach, Sensitivity
from gradveil.study.load import load_run
from gradveil.verdict.level_words import list_words
from gradveil.verdict.recommend import Requirements, recommend
from gradveil.verdict.status import Status, choose_headline
from gradveil.verdict.words import headline_sentence
from tests.unit.report.example_results import DEFENSES, Example, make_results
from tests.unit.report.test_report_page import read


def first_screen(folder: Path, **changes: Any) -> str:
    text = read(write_report(make_results(folder, **changes))).text
    return text[: text.index("Share identified, per defense")]


def test_every_level_stands_on_the_first_screen(tmp_path: Path) -> None:
    first = first_screen(tmp_path, levels=True, owners=True)
    for said in ("Its label 16 of 16", "The record, from a list of 128 16 of 16", "The picture of the record 15 of 16"):
        assert said in first, said
    assert "Its owner, by the picture 4 of 4" in first and "Its owner, from a list 4 of 4" in first
    assert "who holds a list of 128 candidates points out 16 of 16 without it and 2 of 16 with it" in first
    assert "These attackers (quick-1) were shown to win: they break gaussian_noise(std=0.001) (15 of 16)" in first
    assert "once a leak of the raw update is 4.7 % of what is seen" in first
    assert "for 7 of 16 records the search failed" in first


def test_what_was_not_tried_is_said(tmp_path: Path) -> None:
    first = first_screen(tmp_path)
    tested = first[first.index("Not tested") :]
    assert "labels: the cell was measured by a version that did not look" in tested
    assert "an attacker who holds a list of candidates: " in tested
    assert "how strong these attackers are against the defense (power)" in tested and "membership inference" in tested
    assert "Its label not measured" in first and "power not measured" in first
    with_all = first_screen(tmp_path / "all", levels=True)
    assert "(power)" not in with_all and "did not look" not in with_all


def test_what_was_not_tried_stands_before_the_numbers_and_every_status_has_a_sign(tmp_path: Path) -> None:
    first = first_screen(tmp_path)
    above = first[: first.index("Its label")]
    assert "Not tried: labels; an attacker who holds a list of candidates; how strong these attackers are" in above
    assert "broken" in above, "the status stands on the card"
    style = (Path(render.__file__).parent / "templates" / "report.css").read_text(encoding="utf-8")
    signs = dict(re.findall(r"\.chip\.([a-z-]+)::before { content: \"(.)\"", style))
    names = {status.name.lower().replace("_", "-") for status in Status} - {"no-verdict", "untested"}
    assert signs.keys() == names and len(set(signs.values())) == len(names)


def test_who_holds_a_list_says_how_strong_they_are(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    cell = load_run(make_results(tmp_path / "run", levels=True)).cells[0]
    assert cell.levels is not None and cell.levels.listed is not None and list_words(cell) == ""
    reach = Reach(attacker="generic", share=cell.identified, rehearsed=0.22)
    at = {"10": 0.77, "1000000": 0.0069}
    for d, word in ((2.3, "about"), (None, "at least")):
        listed = Listed(
            share=cell.identified, attacker="generic", reached=(reach,), size=256, sensitivity=Sensitivity(d=d, low=1.8, at=at)
        )
        strong = replace(cell, levels=replace(cell.levels, listed=ListLevel(lists={"random": listed})))
        told = list_words(strong).replace("\u00a0", " ")
        assert told == (
            "Of releases of their own, attackers who hold a list of 256 named up to 22 %; "
            f"among 10 candidates expect {word} 77 %, among a million 0.7 %"
        )


def test_table_and_chart_have_every_level(tmp_path: Path) -> None:
    make_results(tmp_path, levels=True, owners=True)
    page = (write_report(tmp_path)).read_text(encoding="utf-8")
    for head in ("Its label", "From a list", "Picture: identified", "Owner, by picture", "Search failed", "Power (a50)"):
        assert f"<th>{head}</th>" in page, head
    assert page.count('class="by-list"') == 2 * len(DEFENSES) + 1, "both charts and the legend"
    plain = write_report(make_results(tmp_path / "old")).read_text(encoding="utf-8")
    assert 'class="by-list"' not in plain and "Owner, by picture" not in plain


def test_what_a_list_names_has_its_own_chip(tmp_path: Path) -> None:
    """Every record is pointed out on the list, and of pictures none is rebuilt."""
    make_results(tmp_path, defenses=[DEFENSES[0], Example("top_k(keep=0.01)", 1, 1, 10.0)], levels=True)
    text = read(write_report(tmp_path)).text
    assert "information there, not found" in text
    assert "The information is there, our search did not get it: 16 of 16 records pointed out on a list of 128" in text
    assert "Not broken by quick-1" not in text


def test_the_strongest_attacker_is_the_same_everywhere(tmp_path: Path) -> None:
    """Headline, card, chart and recommendation took the referee's 1 of 16, with 9 of 16 by one recipe in the table below."""
    make_results(tmp_path, defenses=[DEFENSES[0], Example("gaussian_noise(std=0.1)", 1, 1, 10.0)], seeds=3)
    path = next(path for path in (tmp_path / "cells").glob("*.json") if '"gaussian_noise(std=0.1)"' in path.read_text())
    cell = json.loads(path.read_text())
    cell["attackers"][1]["summary"]["identified"] = {"value": 9 / 16, "low": 0.33, "high": 0.77, "count": 9, "n": 16}
    path.write_text(json.dumps(cell))
    run = load_run(tmp_path)
    headline = choose_headline(run)
    assert headline_sentence(headline).endswith("with the best defense of this run, 9 of 16")
    page = write_report(tmp_path)
    text = read(page).text
    assert "The strongest attacker identified 9 of 16 records" in text and "1 of 16 records (" not in text
    assert "gaussian_noise(std=0.1): 56" in page.read_text(encoding="utf-8").replace("\u00a0", " "), "the chart's description"
    answer = recommend(run, Requirements(max_accuracy_drop=90.0)).as_dict()
    assert [each["identified"]["count"] for each in answer["candidates"]] == [9]
    assert "9 of 16 records identified" in answer["sentence"]


def test_the_command_line_shows_every_level(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    from gradveil.cli.results import print_results, results_as_dict

    run = load_run(make_results(tmp_path, levels=True, owners=True))
    print_results(run)
    said = capsys.readouterr().out.replace("\u00a0", " ")
    for words in ("label", "16/16  null 25 %", "[81–100 %]", "4/4  null 25 %", "[51–100 %]"):
        assert words in said, words
    header = next(line for line in said.splitlines() if "search" in line and "info" in line)
    places = [header.index(name) for name in ("search", "info")]
    noisy = next(line for line in said.splitlines() if line.startswith(" gaussian_noise(std=0.1)"))
    assert [noisy[place : place + 5].strip() for place in places] == ["7/16", "8/16"], "both shares stand on the row"
    assert "all defenses: These attackers (quick-1) were shown to win" in " ".join(said.split())
    rows = results_as_dict(run)["cells"]
    assert rows[0]["levels"]["label"]["share"]["count"] == 16 and rows[0]["levels"]["list"]["size"] == 128
    assert rows[0]["levels"]["owner"]["share"]["n"] == 4 and rows[1]["power"]["a50"] == 0.047
    assert main(["report", str(tmp_path)]) == 0
