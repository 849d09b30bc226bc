"""Put the page together: one HTML file, nothing fetched, every user string escaped.

The page's content security policy names its one script and one style sheet by hash, so even a string that slipped through the
escaping could neither run nor load anything. A shareable page about user data may not even show inline pictures.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from gradveil.errors import UsageError
from gradveil.report import pictures, tables
from gradveil.report.charts import Axis, frontier_chart, identified_chart, on_frontier, strip
from gradveil.report.daggers import setting_daggers
from gradveil.report.power_views import power_rows
from gradveil.report.risk_views import risk_section, told_coefficient
from gradveil.report.utility_charts import curve_panels, decision_chart, training_chart
from gradveil.storage.files import write_whole
from gradveil.study.load import is_training, load_run, load_training
from gradveil.study.results import CellResult
from gradveil.study.run_result import Run
from gradveil.study.training_result import TrainingResult
from gradveil.verdict import level_words, levels, numbers, status, words

__all__ = ["page_assets", "page_template", "render_report", "render_training", "write_report", "write_whole_page"]

TEMPLATES = Path(__file__).parent / "templates"
MOST_RECORDS = 1000


def write_report(results: Path, out: Path | None = None, private: bool = False) -> Path:
    """Write the report of a results folder and return its path.

    Args:
        results: The folder that ``gradveil audit --out`` or ``gradveil train --out`` wrote.
        out: The file to write; by default ``report.html`` in the folder, or ``report-private.html`` for a private one.
        private: Whether to show originals, reconstructions, labels and record ids of user data. Such a file must stay in the
            building. The shareable file is not written by the same call.

    Raises:
        UsageError: If the folder cannot be read, or the file cannot be written.
    """
    results = Path(results)
    if is_training(results):
        page = render_training(load_training(results, share=not private), private=private)
    else:
        page = render_report(load_run(results, share=not private), private=private)
    path = Path(out) if out is not None else results / ("report-private.html" if private else "report.html")
    if path.is_dir():
        raise UsageError(f"cannot write the report to {str(path)!r}: it is a folder; name a file")
    try:
        write_whole_page(path, page)
    except OSError as error:
        raise UsageError(f"cannot write the report to {str(path)!r}: {error.strerror or error}") from error
    return path


def write_whole_page(path: Path, page: str) -> None:
    """Write a page so that a reader finds the old one or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, page.encode())


def render_report(run: Run, *, private: bool) -> str:
    """Return the page as text."""
    return _environment().get_template("page.html.jinja").render(**_context(run, private))


def render_training(training: TrainingResult, *, private: bool) -> str:
    """Return the page of one training as text."""
    style, script = _asset("report.css"), _asset("report.js")
    curve, score = training.curve, "Dice" if training.score == "dice" else "Accuracy"
    return (
        _environment()
        .get_template("training.html.jinja")
        .render(
            style=Markup(style),
            script=Markup(script),
            policy=_policy(style, script, show_pictures=False),
            training=training,
            private=private and not training.builtin_data,
            score=score,
            defense=training.settings.defense,
            chart=training_chart(curve, score=score) if curve.rounds else None,
            words=words.utility_words(training.settings),
            tested=words.tested_words(training.settings.weights),
        )
    )


def page_template(name: str) -> Template:
    """Return a template that shares the report's filters and escapes everything."""
    return _environment().get_template(name)


def page_assets(*, show_pictures: bool) -> tuple[str, str]:
    """Return the style sheet, and a content security policy that allows it and nothing else."""
    style = _asset("report.css")
    return style, _policy(style, "", show_pictures)


@functools.cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    for name in (
        "percent",
        "interval",
        "db",
        "size",
        "ms",
        "duration",
        "times",
        "spread",
        "plain_json",
        "accuracy",
        "points",
        "ratio",
        "significant",
    ):
        made.filters[name] = getattr(numbers, name)
    made.filters["coefficient"] = told_coefficient
    made.filters["score"] = lambda value: numbers.MISSING if value is None else f"{value:.3f}"
    made.filters["error"] = lambda value: numbers.MISSING if value is None else f"{value:.2g}"
    made.filters["sentence"] = words.sentence
    made.filters["short"] = lambda text: text.partition(":")[0]
    made.filters["spaced"] = lambda text: str(text).replace("_", " ")
    made.globals.update(
        count=numbers.count,
        status_of=status.status_of,
        bar_of=levels.bar_of,
        level_of=levels.level_of,
        judgement=words.judgement,
        level_rows=level_words.level_rows,
        power_words=level_words.power_words,
        gap_words=level_words.gap_words,
        list_words=level_words.list_words,
        gain_words=level_words.gain_words,
    )
    return made


def _context(run: Run, private: bool) -> dict[str, Any]:
    headline = status.choose_headline(run)
    show_pictures = private or run.builtin_data
    style, script = _asset("report.css"), _asset("report.js")
    return {
        "style": Markup(style),
        "script": Markup(script),
        "policy": _policy(style, script, show_pictures),
        "run": run,
        "headline": headline,
        "private": private and not run.builtin_data,
        "show_pictures": show_pictures,
        **_first_screen(headline, run, show_pictures),
        **_details(headline, run, private, show_pictures),
    }


def _asset(name: str) -> str:
    return "\n" + (TEMPLATES / name).read_text(encoding="utf-8")


def _policy(style: str, script: str, show_pictures: bool) -> str:
    def source(text: str) -> str:
        return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"

    shown = "data:" if show_pictures else "'none'"
    inline = f"style-src {source(style)}; script-src {source(script)}"
    return f"default-src 'none'; img-src {shown}; {inline}; base-uri 'none'; form-action 'none'"


def _first_screen(headline: status.Headline, run: Run, show_pictures: bool) -> dict[str, Any]:
    shown = [cell for cell in (headline.undefended, headline.best) if cell is not None]
    lead = headline.undefended or headline.setting.cells[0]
    return {
        "title": run.title or "Gradveil audit",
        "sentence": words.headline_sentence(headline),
        "progress": words.progress_sentence(run),
        "trust": words.trust(headline, run),
        "not_tried": level_words.not_tried(shown or headline.setting.cells),
        "threats": words.threat_sentences(shown or headline.setting.cells),
        "setting": words.setting_words(lead),
        "identified_sentence": words.identified_sentence,
        "costs": words.costs(headline.best, headline.undefended) if headline.best is not None else [],
        "strips": {cell.key: strip(cell, f"strip-{cell.key}") for cell in shown},
        "showcase": pictures.showcase(*((headline.undefended, headline.best) if show_pictures else (None, None))),
    }


def _details(headline: status.Headline, run: Run, private: bool, show_pictures: bool) -> dict[str, Any]:
    leading = headline.setting
    judged = [cell for cell in leading.cells if not cell.failures]
    ids = _ids(leading.cells) if private else {}
    rows = tables.records(headline, ids)
    names = [cell.defense.spelling for cell in (headline.undefended, headline.best) if cell is not None]
    varying = tables.differing(run.cells)
    settings = [leading, *(setting for setting in headline.settings if setting is not leading)]
    return {
        "settings": [_setting(setting, varying, index) for index, setting in enumerate(settings)],
        "levelled": any(levels.level_of(cell, name).share for cell in run.cells for name in ("label", "list")),
        "judged": judged,
        "frontiers": _frontiers(judged),
        **_decision(judged),
        "heat_maps": tables.heat_maps(run.cells, names),
        "records": rows[:MOST_RECORDS],
        "record_count": len(rows),
        "owners": tables.owners(rows),
        "risk": risk_section(leading.cells, headline.undefended, headline.best, show_pictures),
        "galleries": pictures.galleries(leading.cells, headline.undefended) if show_pictures else [],
        "flags": tables.flags(headline.settings),
        "nulls": words.NULLS,
        "seconds": sum(cell.timing.seconds or 0.0 for cell in run.cells) or None,
    }


def _setting(setting: status.Setting, varying: Sequence[str], index: int) -> dict[str, Any]:
    ident = f"identified-{index}"
    return {
        "cells": setting.cells,
        "undefended": setting.undefended,
        "owned": any(levels.level_of(cell, "owner").share for cell in setting.cells),
        "proofs": tables.proofs([(cell, cell.defense.guarantee) for cell in setting.cells]),
        "certificates": tables.certificates(setting.cells),
        "daggers": setting_daggers(setting),
        "power": power_rows(setting.cells, f"power-{index}"),
        "title": words.setting_words(setting.cells[0], varying) if varying else words.setting_words(setting.cells[0]),
        "wide": identified_chart(setting.cells, ident=ident),
        "narrow": identified_chart(setting.cells, narrow=True, ident=ident),
    }


def _decision(judged: Sequence[CellResult]) -> dict[str, Any]:
    """Return privacy beside utility, for the leading setting; empty where no training was asked for."""
    trained = [cell.utility for cell in judged if cell.utility is not None]
    if not trained:
        return {"decision": None}
    values = [cell.accuracy.value if cell.accuracy else None for cell in judged]
    leaks = [cell.identified.high for cell in judged]
    return {
        "decision": {
            "wide": decision_chart(judged),
            "narrow": decision_chart(judged, narrow=True),
            "front": on_frontier(values, leaks, lower_is_better=False),
            "panels": curve_panels(judged),
            "words": words.utility_words(trained[0].settings),
            "tested": words.tested_words(next((cell.settings.weights for cell in judged), "")),
            "seeds": max(each.accuracy.n for each in trained),
            "chance": trained[0].chance,
            "proofs": tables.proofs([(cell, cell.utility.guarantee if cell.utility else None) for cell in judged]),
        }
    }


def _frontiers(judged: Sequence[CellResult]) -> list[dict[str, Any]]:
    axes = [
        Axis(name="client time", label="client time, × undefended", values=tuple(cell.timing.ratio for cell in judged)),
        Axis(name="bytes sent", label="bytes sent, × undefended", values=tuple(cell.bytes_ratio for cell in judged)),
    ]
    shown = [axis for axis in axes if tables.spread_out(axis.values)]
    return [{"axis": axis, "chart": frontier_chart(judged, axis, f"frontier-{axis.name.replace(' ', '-')}")} for axis in shown]


def _ids(cells: Sequence[CellResult]) -> dict[str, str]:
    found: dict[str, str] = {}
    for cell in cells:
        found |= {record.pseudonym: ident for record, ident in zip(cell.records, pictures.read_ids(cell), strict=False)}
    return found
