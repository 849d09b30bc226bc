"""Tables of studies: every kind, several studies in one, and pages that are filled from results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradveil.errors import UsageError
from gradveil.report.study_tables import fill_studies, table_of_studies
from gradveil.storage.study_file import write_study


def share(count: int, n: int = 8) -> dict[str, Any]:
    return {"value": count / n, "low": 0.1, "high": 0.9, "count": count, "n": n}


def summary(count: int, psnr: float) -> dict[str, Any]:
    spread = {"median": psnr, "low": psnr - 1, "high": psnr + 1}
    return {"identified": share(count), "psnr": spread, "ssim": {"median": 0.5}, "lpips": {"unavailable": "too small"}}


def cell(key: str, informed: int | None = 7, **settings: Any) -> dict[str, Any]:
    asked = {"defense": "none", "model": "lenet", "batch_size": 1, "local_steps": 1, "ensemble": "quick-3", "device": "cpu"}
    return {
        "key": key,
        "n": 8,
        "cell": asked | settings,
        "selected": summary(6, 20.0),
        "plain": summary(2, 11.0),
        "informed": None if informed is None else summary(informed, 21.0),
        "best_by_truth": summary(8, 22.0),
        "bar": {"identified": {"null": "prior_only", "value": 0.125}, "psnr": {"null": "grey", "value": 9.96}},
    }


def study(table: str, *cells: dict[str, Any], rows: tuple[tuple[str, str], ...] = (), **more: Any) -> dict[str, Any]:
    layout = {"table": table, "rows": [list(row) for row in rows]}
    return {"format": "gradveil-study-1", "name": "mine", "study": layout, "cells": list(cells), **more}


def body(*studies: dict[str, Any]) -> list[str]:
    return table_of_studies(studies).splitlines()[2:]


def test_attacks_in_the_order_of_the_rows() -> None:
    rows = (("dgp", "DGP"), ("none", "no defense"))
    found = study("attacks", cell("a", None), cell("b", defense="dgp"), cell("c", defense="mq"), rows=rows)
    found["documents"] = {"lpips.json": {"b": {"plain": 0.5, "informed": 0.25}}}
    assert body(found) == [
        "| DGP | 7 of 8 (10–90 %) | 2 of 8 (10–90 %) | 11.0 | 7 of 8 (10–90 %) | 21.0 | .500 | .250 | 1 (prior only) | 10.0 |",
        "| no defense | 6 of 8 (10–90 %) | 2 of 8 (10–90 %) | 11.0 | 2 of 8 (10–90 %) | 11.0 | .500 | – | 1 (prior only) "
        "| 10.0 |",
    ]


def test_levels_say_how_far_to_believe_them() -> None:
    measured = cell("a", defense="dgp") | {
        "bar": {"identified": {"null": "prior_only", "value": 0.125, "high": 0.5}, "psnr": {"null": "grey", "value": 9.96}},
        "gap": {"search_failed": share(3), "information_gone": share(1), "found": share(4)},
        "power": {
            "a50": 0.25,
            "ladder": [
                {"spelling": "weak", "identified": share(8) | {"low": 0.6}, "null": {"null": "grey", "value": 0.1, "high": 0.4}},
                {"spelling": "as is", "identified": share(1), "null": {"null": "grey", "value": 0.1, "high": 0.4}},
            ],
        },
    }
    assert body(study("levels", measured, cell("b", None))) == [
        "| `dgp` | 7 of 8 (10–90 %), null 12 % | the choice of informed attackers | 2 of 8 (10–90 %) | 7 of 8 (10–90 %) "
        "| 20.0 (10.0) | 3 · 1 "
        "| a50 0.25, 1 of 2 weaker |",
        "| `none` | 6 of 8 (10–90 %), null 12 % | the choice among all | 2 of 8 (10–90 %) | – | 20.0 (10.0) | – | – |",
    ]


def test_rows_of_one_defense_say_what_else_differs() -> None:
    found = study("attacks", cell("a", records=32), cell("b", records=16, rounds=4), cell("c", defense="dgp"))
    assert [line.split(" | ")[0] for line in body(found)] == [
        "| `dgp`",
        "| `none`, records 32",
        "| `none`, rounds 4, records 16",
    ]
    found = study("attacks", cell("a", known_labels=False), cell("b", known_labels=True))
    assert [line.split(" | ")[0] for line in body(found)] == ["| `none`, known_labels False", "| `none`, known_labels True"]


def test_several_studies_make_one_table() -> None:
    one = study("attacks", cell("a"), rows=(("none", "no defense"), ("dgp", "DGP")))
    two = study("attacks", cell("b", defense="dgp"), rows=(("dgp", "DGP, later"),))
    assert [line.split(" | ")[0] for line in body(two, one)] == ["| DGP, later", "| no defense"]
    assert [line.split(" | ")[0] for line in body(one, two)] == ["| no defense", "| DGP, later"]
    with pytest.raises(UsageError, match="several kinds"):
        table_of_studies([one, study("summary", cell("a"))])
    with pytest.raises(UsageError, match="has no table"):
        table_of_studies([study("none")])


def test_settings_say_what_was_attacked_and_by_whom() -> None:
    found = study(
        "settings",
        cell("a", steps=1500, batch_size=4, local_steps=4, device="cuda"),
        cell("b", ensemble="standard-2"),
        cell("c", ensemble="dlg"),
        rows=(("lenet", "LeNet"), ("dlg", "DLG alone")),
    )
    assert [line.split(" | ")[:5] for line in body(found)] == [
        ["| LeNet", "1", "1", "standard-2, CPU", "7 of 8 (10–90 %)"],
        ["| LeNet", "1", "1", "DLG alone, CPU", "7 of 8 (10–90 %)"],
        ["| LeNet", "4", "4 (FedAvg)", "quick-3, ≤ 1,500 steps", "7 of 8 (10–90 %)"],
    ]
    assert body(found)[0].endswith("| 20.0 (19.0–21.0) | .500 | 22.0 | 10.0 |")


def test_a_summary_has_what_the_front_page_shows() -> None:
    (line,) = body(study("summary", cell("a", None)))
    assert line == "| `none` | 6 of 8 (10–90 %) | 2 of 8 (10–90 %) | – | 20.0 dB (19.0–21.0) | 10.0 dB |"


def with_levels(**levels: Any) -> dict[str, Any]:
    return {**cell("b", None, defense="dgp"), "levels": levels}


def test_label_and_list_have_columns_where_somebody_measured_them() -> None:
    null = {"null": "guess", "value": 0.25, "high": 0.3}
    listed = {"lists": {"random": {"share": share(8), "null": {"null": "guess", "value": 0.125}, "size": 256}}}
    found = study("summary", cell("a", None), with_levels(label={"share": share(5), "null": null}, list=listed))
    head, _, *rows = table_of_studies([found]).splitlines()
    assert head.startswith("| defense | label | list | identified, strongest attacker |")
    assert rows[1].startswith("| `dgp` | 5 of 8 (10–90 %), null 25 % | 8 of 8 (10–90 %), null 12 % | 6 of 8")
    assert rows[0].startswith("| `none` | – | – | 6 of 8"), "an older cell beside it"
    only = study("attacks", with_levels(list=listed))
    assert table_of_studies([only]).startswith("| defense | list | strongest: identified | plain: identified |")
    assert "list" not in table_of_studies([study("summary", with_levels(owners={"share": share(3)}))]).splitlines()[0]


def test_below_a_table_of_levels_stands_how_well_psnr_tells_them() -> None:
    def row(key: str, psnr: float, pictures: int, listed: int | None, owners: int) -> dict[str, Any]:
        lists = {"lists": {"random": {"share": share(listed), "size": 256}}} if listed is not None else {}
        told = cell(key, None) | {"selected": summary(pictures, psnr), "plain": summary(pictures, psnr)}
        return told | {"levels": {"list": lists, "owners": {"share": share(owners)}}}

    rows = [row("a", 10.0, 1, 8, 1), row("b", 12.0, 3, 5, 2), row("c", 14.0, 3, None, 3), row("d", 20.0, 8, 3, 3)]
    told = table_of_studies([study("levels", *rows)]).splitlines()[-1]
    assert told == (
        "Rank correlation of the median PSNR over rows with the share identified: "
        "of pictures +.95 (4 rows), of lists −1.00 (3 rows), of owners +.95 (4 rows)."
    )
    assert "Rank" not in table_of_studies([study("levels", *rows[:2])]) and "Rank" not in table_of_studies(
        [study("attacks", *rows)]
    )
    assert table_of_studies([study("levels", *[rows[0]] * 3)]).splitlines()[-1].startswith("|"), "nothing varies"


def test_batches_have_intervals_by_update() -> None:
    """Eight records of two updates, all or none hit: two draws."""
    records = [{"identified": False, "rank": 9}] * 8
    nobody = {"value": 0.0, "low": 0.0, "high": 0.32, "count": 0, "n": 8}
    missed = {name: {**summary(0, 9.0), "identified": nobody} for name in ("selected", "plain")}
    single = {**cell("a", None), **missed, "records": records}
    batch = {**cell("b", None, batch_size=4), **missed, "records": records}
    assert "| 0 of 8 (0–32 %) |" in body(study("settings", single))[0]
    assert "| 0 of 8 (0–66 %) |" in body(study("settings", batch))[0]


def trained(key: str, defense: str, seed: int, accuracy: float, up: int) -> dict[str, Any]:
    return {
        "key": key,
        "training": {"defense": defense, "seed": seed},
        "final_accuracy": accuracy,
        "bytes": {"up": up, "down": 100},
    }


def test_accuracies_are_paired_by_seed_in_either_format() -> None:
    new = study(
        "accuracy",
        trainings=[
            trained("a", "none", 0, 0.8, 100),
            trained("b", "none", 1, 0.6, 100),
            trained("c", "dgp", 0, 0.7, 50),
            trained("d", "dgp", 1, 0.5, 50),
            trained("e", "mq", 1, 0.6, 50),
        ],
        training_timings={"c": {"latency": {"ratio": 1.5}}, "d": {"latency": None}},
    )
    old = study(
        "accuracy",
        documents={
            each["key"]: {
                "format": "gradveil-accuracy-1",
                "settings": each["training"],
                "final_accuracy": each["final_accuracy"],
                "bytes_up": each["bytes"]["up"],
                "bytes_down": each["bytes"]["down"],
                "latency": new["training_timings"].get(each["key"], {}).get("latency"),
            }
            for each in new["trainings"]
        },
    )
    assert body(new) == body(old)
    assert body(new)[1:] == [
        "| `dgp` | 60.0 ± 127.1 | -10.0 ± 0.0 | 0.854 | 0.50 | 0.75 | 1.50× |",
        "| `mq` | 60.0 | +0.0 | 1.000 | 0.50 | 0.75 | – |",
    ]
    with pytest.raises(UsageError, match="no undefended training"):
        table_of_studies([study("accuracy", trainings=[trained("c", "dgp", 0, 0.7, 50)])])


def test_pages_are_filled_from_results(tmp_path: Path) -> None:
    write_study(tmp_path / "mine.json.xz", study("summary", cell("a")))
    page = "before\n\n<!-- study: mine -->\n| stale |\n<!-- end -->\n\nafter <!-- study: none -->"
    filled = fill_studies(page, tmp_path)
    assert filled == page.replace("| stale |\n", table_of_studies([study("summary", cell("a"))]))
    assert fill_studies(filled, tmp_path) == filled
    with pytest.raises(UsageError, match="cannot read the results"):
        fill_studies(page.replace("mine", "other, mine"), tmp_path)
