"""Tables of studies in Markdown, and the pages of the docs that show them. Results in, text out; needs no torch.

A page marks the place of a table with ``<!-- study: NAME -->`` and ``<!-- end -->``; several names, with commas, make one table.
Where a study has several tables, ``NAME#part`` is one of them. ``make index`` fills it, and a test says when page and results
differ.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradveil.errors import UsageError, suggest
from gradveil.storage.study_file import read_study
from gradveil.study.codec import decode
from gradveil.study.evidence import Power
from gradveil.study.measures import Share, Summary
from gradveil.study.results import CellResult
from gradveil.verdict.levels import View, level_of

__all__ = ["fill_studies", "table_of_studies"]

MARK = re.compile(r"^(<!-- study: ([\w, #-]+?) -->\n).*?(^<!-- end -->)", re.DOTALL | re.MULTILINE)
"""At the start of a line: an indented mark is an example of one."""
MISSING = "–"
BASELINE = "none"
AFTERWARDS = "lpips.json"
"""Where the weights of LPIPS were not at hand, it was taken afterwards, from pictures rounded to eight bits."""
APART = (
    *("data", "model", "state", "batch_size", "local_steps", "local_epochs", "minibatch", "shuffle", "momentum", "dropout"),
    *("clients", "rounds", "cut", "known_labels", "prior"),
    *("ensemble", "steps", "records", "seed"),
)
"""Settings that tell two rows of one defense apart."""
Line = tuple[tuple[Any, ...], list[str]]
"""Where a row stands, and its cells."""


def fill_studies(page: str, results: Path) -> str:
    """Return a page with the table of every marked study made anew from its results.

    Args:
        page: Markdown.
        results: The folder that holds ``NAME.json.xz``.
    """

    def fill(found: re.Match[str]) -> str:
        names = [name.strip().partition("#") for name in found[2].split(",")]
        studies = [read_study(results / f"{name}.json.xz") for name, _, _ in names]
        return f"{found[1]}{table_of_studies(studies, names[0][2])}{found[3]}"

    return MARK.sub(fill, page)


def table_of_studies(studies: Sequence[Mapping[str, Any]], part: str = "") -> str:
    """Return the table of one study, or one of several whose tables are of the same kind, the rows of all in one order.

    Args:
        studies: What their files hold.
        part: Of a scripted study with several tables, which; without it, all of them.
    """
    if len(studies) == 1 and "tables" in studies[0]:
        return _scripted(studies[0], part)
    kinds = {str(study.get("study", {}).get("table", "none")) for study in studies}
    names = ", ".join(str(study.get("name")) for study in studies)
    if len(kinds) != 1:
        raise UsageError(f"the studies {names} have tables of several kinds: {', '.join(sorted(kinds))}; ask for each alone")
    kind = kinds.pop()
    if kind not in MAKERS:
        raise UsageError(f"the study {names} has no table: its figures stand in `documents`, and a page tells of them")
    head, rows = MAKERS[kind]
    levels = _measured_levels(studies) if kind != "accuracy" else ()
    head = [head[0], *levels, *head[1:]]
    titles: dict[str, str] = {}
    for study in studies:
        titles |= {spelling: title for spelling, title in study["study"].get("rows", []) if spelling not in titles}
    lines = sorted((line for study in studies for line in rows(study, list(titles), levels)), key=lambda line: line[0])
    rule = "|" + "---|" * len(head)
    top, *body = (f"| {' | '.join(cells)} |" for cells in (head, *(cells for _, cells in lines)))
    return "\n".join([top, rule, *body, *(_goes_with(studies) if kind == "levels" else [])]) + "\n"


def _goes_with(studies: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say over all rows how well the most usual figure, PSNR, tells what is identified at each level, and of owners."""
    cells = [_told(cell) for study in studies for cell in study.get("cells", [])]
    told = []
    for what, share in (("of pictures", _pictured), ("of lists", _listed), ("of owners", _owned)):
        pairs = [
            (cell.selected.psnr.median, found) for cell in cells if cell.selected.psnr and (found := share(cell)) is not None
        ]
        ranks = [_ranks(side) for side in zip(*pairs, strict=True)]
        if len(pairs) > 2 and all(len(set(side)) > 1 for side in ranks):
            told.append(f"{what} {_signed(statistics.correlation(*ranks))} ({len(pairs)} rows)")
    return ["", f"Rank correlation of the median PSNR over rows with the share identified: {', '.join(told)}."] if told else []


def _pictured(cell: CellResult) -> float | None:
    return cell.identified.value


def _listed(cell: CellResult) -> float | None:
    found = level_of(cell, "list").share
    return None if found is None else found.value


def _owned(cell: CellResult) -> float | None:
    found = cell.levels.owners.share if cell.levels and cell.levels.owners else None
    return None if found is None else found.value


def _ranks(values: Sequence[float]) -> list[float]:
    """Return ranks, those of ties their mean."""
    ordered = sorted(values)
    return [ordered.index(each) + (ordered.count(each) - 1) / 2 for each in values]


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("0.", ".").replace("-", "−")


def _scripted(study: Mapping[str, Any], part: str) -> str:
    """Return what the script of a study made of its results."""
    made: Mapping[str, str] = study["tables"]
    if part and part not in made:
        raise UsageError(f"the study {study.get('name')} has no table {part!r}{suggest(part, made)}")
    if part or len(made) == 1:
        return made[part] if part else next(iter(made.values()))
    return "\n".join(f"**{name}**\n\n{text}" for name, text in made.items())


def _titles(study: Mapping[str, Any]) -> dict[str, str]:
    return {spelling: title for spelling, title in study["study"].get("rows", [])}


def _spelt(study: Mapping[str, Any], spelling: str) -> str:
    """Return a setting as the study spells it; cells spell defenses with all that decides them."""
    return str(study.get("spellings", {}).get(spelling, spelling))


def _shown(study: Mapping[str, Any], name: str) -> list[tuple[Mapping[str, Any], str]]:
    """Return the cells that the table shows, with the title of the setting its rows are about."""
    titles = _titles(study)
    cells = [(cell, _spelt(study, cell["cell"][name])) for cell in study.get("cells", [])]
    return [(cell, titles.get(spelling, f"`{spelling}`")) for cell, spelling in cells if spelling in titles or not titles]


def _told_apart(study: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], str]]:
    """Return the cells of a table of defenses; where several grids hold one defense, the title says what else differs."""
    shown = _shown(study, "defense")
    told = []
    for cell, title in shown:
        alike = [other["cell"] for other, same in shown if same == title]
        own = [name for name in APART if len({str(settings.get(name)) for settings in alike}) > 1]
        told.append((cell, ", ".join([title, *(f"{name} {cell['cell'][name]}" for name in own if name in cell["cell"])])))
    return told


def _measured_levels(studies: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return which of label and list some cell was measured at: their columns come first; pictures have theirs in any table."""
    cells = [cell for study in studies for cell in study.get("cells", [])]
    found = [decode(CellResult, cell) for cell in cells if cell.get("levels")]
    return tuple(name for name in ("label", "list") if any(level_of(cell, name).share is not None for cell in found))


def _levels(cell: CellResult, names: Sequence[str]) -> list[str]:
    """Return what the strongest attacker got at each level, beside what is had without the update."""
    views = [level_of(cell, name) for name in names]
    return [MISSING if view.share is None else f"{_share(view.share)}{_without(view)}" for view in views]


def _without(view: View) -> str:
    return f", null {100 * view.null.value:.0f} %" if view.null is not None else ""


def _told(cell: Mapping[str, Any]) -> CellResult:
    return decode(CellResult, cell)


def _attacks(study: Mapping[str, Any], order: Sequence[str], levels: Sequence[str]) -> list[Line]:
    lines = []
    afterwards = study.get("documents", {}).get(AFTERWARDS, {})
    for number, (cell, title) in enumerate(_told_apart(study)):
        plain, informed, bar = cell["plain"], cell["informed"] or cell["plain"], cell["bar"]
        own, found = afterwards.get(cell["key"], {}), _told(cell)
        null = bar["identified"]
        cells = [
            title,
            *_levels(found, levels),
            _share(found.identified),
            _identified(found, found.plain),
            _number(plain, "psnr"),
            _identified(found, found.informed or found.plain),
            _number(informed, "psnr"),
            _number(informed, "ssim", 3),
            f"{own.get('informed', own['plain']):.3f}".lstrip("0") if own else _number(informed, "lpips", 3),
            f"{null['value'] * cell['n']:.0f} ({null['null'].replace('_', ' ')})",
            f"{bar['psnr']['value']:.1f}",
        ]
        lines.append(((_place(order, _spelt(study, cell["cell"]["defense"])), title, number), cells))
    return lines


def _leaks(study: Mapping[str, Any], order: Sequence[str], levels: Sequence[str]) -> list[Line]:
    """Return rows of all levels, who ignores the defense and who knows it, and how far to believe them."""
    lines = []
    for number, (cell, title) in enumerate(_told_apart(study)):
        found = _told(cell)
        gap, power = found.gap, found.power
        cells = [
            title,
            *_levels(found, levels),
            f"{_share(found.identified)}{_without(level_of(found, 'picture'))}",
            found.strongest.name if found.identified.count else MISSING,
            _identified(found, found.plain),
            _identified(found, found.informed),
            f"{_number(cell['selected'], 'psnr')} ({cell['bar']['psnr']['value']:.1f})",
            MISSING if gap is None else f"{gap.search_failed.count} · {gap.information_gone.count}",
            MISSING if power is None or power.reason else _shown_power(power),
        ]
        lines.append(((_place(order, _spelt(study, cell["cell"]["defense"])), title, number), cells))
    return lines


def _shown_power(power: Power) -> str:
    """Return at which weight of a planted leak half of the records were found, and how many weaker settings were broken."""
    planted = "a50 –" if power.a50 is None else f"a50 {power.a50:.2g}"
    broken = sum(rung.broken for rung in power.ladder)
    return f"{planted}, {broken} of {len(power.ladder)} weaker" if power.ladder else planted


def _settings(study: Mapping[str, Any], order: Sequence[str], levels: Sequence[str]) -> list[Line]:
    lines = []
    for number, (cell, title) in enumerate(_shown(study, "model")):
        asked, chosen = cell["cell"], cell["selected"]
        size, steps, cap = int(asked["batch_size"]), int(asked["local_steps"]), int(asked.get("steps", 0))
        names, found = _titles(study), _told(cell)
        attackers = [names.get(asked["ensemble"], asked["ensemble"]), *([f"≤ {cap:,} steps"] if cap else [])]
        cells = [
            title,
            *_levels(found, levels),
            str(size),
            f"{steps} (FedAvg)" if steps > 1 else str(steps),
            ", ".join([*attackers, *(["CPU"] if asked.get("device") == "cpu" else [])]),
            _share(found.identified),
            _spread(chosen, "psnr"),
            _number(chosen, "ssim", 3),
            _number(cell["best_by_truth"], "psnr"),
            f"{cell['bar']['psnr']['value']:.1f}",
        ]
        lines.append(((_place(order, asked["model"]), size, steps, _strength(asked["ensemble"]), number), cells))
    return lines


def _summary(study: Mapping[str, Any], order: Sequence[str], levels: Sequence[str]) -> list[Line]:
    lines = []
    for number, (cell, title) in enumerate(_told_apart(study)):
        psnr = f"{_spread(cell['selected'], 'psnr', ' dB')}"
        null = f"{cell['bar']['psnr']['value']:.1f} dB"
        found = _told(cell)
        alone = [_identified(found, found.plain), _identified(found, found.informed)]
        cells = [title, *_levels(found, levels), _share(found.identified), *alone, psnr, null]
        lines.append(((_place(order, _spelt(study, cell["cell"]["defense"])), number), cells))
    return lines


@dataclass(frozen=True)
class _Trained:
    """What a training left, in whichever format."""

    accuracy: float
    up: float
    down: float
    slower: float | None


def _accuracy(study: Mapping[str, Any], order: Sequence[str], levels: Sequence[str]) -> list[Line]:
    found: dict[str, dict[int, _Trained]] = {}
    for defense, seed, trained in _trainings(study):
        found.setdefault(_spelt(study, defense), {})[seed] = trained
    titles = _titles(study) or {defense: f"`{defense}`" for defense in found}
    if BASELINE not in found:
        raise UsageError(f"the study {study.get('name')} has no undefended training to compare with")
    shown = [(defense, title) for defense, title in titles.items() if defense in found]
    return [((_place(order, defense),), [title, *_paired(found[defense], found[BASELINE])]) for defense, title in shown]


def _trainings(study: Mapping[str, Any]) -> list[tuple[str, int, _Trained]]:
    found = []
    for each in study.get("trainings", []):
        timing = study.get("training_timings", {}).get(each["key"], {})
        sent, asked = each["bytes"], each["training"]
        trained = _Trained(each["final_accuracy"], sent["up"], sent["down"], (timing.get("latency") or {}).get("ratio"))
        found.append((asked["defense"], asked["seed"], trained))
    for each in study.get("documents", {}).values():
        if isinstance(each, Mapping) and each.get("format") == "gradveil-accuracy-1":
            ratio = (each.get("latency") or {}).get("ratio")
            trained = _Trained(each["final_accuracy"], each["bytes_up"], each["bytes_down"], ratio)
            found.append((each["settings"]["defense"], each["settings"]["seed"], trained))
    return found


def _paired(own: Mapping[int, _Trained], undefended: Mapping[int, _Trained]) -> list[str]:
    pairs = [(own[seed], undefended[seed]) for seed in sorted(own.keys() & undefended.keys())]
    slower = [a.slower for a, _ in pairs if a.slower]
    return [
        _mean([100 * a.accuracy for a, _ in pairs]),
        _mean([100 * (a.accuracy - b.accuracy) for a, b in pairs], sign="+"),
        f"{statistics.mean(a.accuracy / b.accuracy for a, b in pairs):.3f}",
        f"{statistics.mean(a.up / b.up for a, b in pairs):.2f}",
        f"{statistics.mean((a.up + a.down) / (b.up + b.down) for a, b in pairs):.2f}",
        f"{statistics.median(slower):.2f}×" if slower else MISSING,
    ]


def _mean(values: Sequence[float], sign: str = "") -> str:
    from gradveil.run.pairs import t_interval  # scipy takes longer to load than a report to write

    found = t_interval(values)
    half = "" if found.high is None else f" ± {found.high - found.value:.1f}"
    # The exact mean, correctly rounded: the quick one turns a tie of decimals, 50.45, the other way.
    return f"{statistics.mean(values):{sign}.1f}{half}"


def _place(order: Sequence[str], spelling: str) -> int:
    return order.index(spelling) if spelling in order else len(order)


def _strength(ensemble: str) -> tuple[int, str]:
    """Return a place for an ensemble: the strongest first, as far as names tell."""
    kinds = ("standard", "quick")
    return next((place for place, kind in enumerate(kinds) if ensemble.startswith(kind)), len(kinds)), ensemble


def _identified(cell: CellResult, summary: Summary | None) -> str:
    return MISSING if summary is None else _share(cell.told(summary.identified))


def _share(found: Share) -> str:
    """Return ``15 of 16 (72–99 %)``."""
    return f"{found.count} of {found.n} ({100 * found.low:.0f}–{100 * found.high:.0f} %)"


def _number(summary: Mapping[str, Any] | None, name: str, digits: int = 1) -> str:
    found = (summary or {}).get(name)
    if not isinstance(found, Mapping) or found.get("median") is None:
        return MISSING
    text = f"{found['median']:.{digits}f}"
    return text.lstrip("0") if digits > 1 else text


def _spread(summary: Mapping[str, Any], name: str, unit: str = "") -> str:
    found = summary[name]
    return f"{found['median']:.1f}{unit} ({found['low']:.1f}–{found['high']:.1f})"


def _head(text: str) -> list[str]:
    return [each.strip() for each in text.split("|")]


MAKERS: dict[str, tuple[list[str], Callable[[Mapping[str, Any], Sequence[str], Sequence[str]], list[Line]]]] = {
    "attacks": (
        _head(
            "defense | strongest: identified | plain: identified | PSNR, dB | informed: identified | PSNR, dB | SSIM | LPIPS | "
            "null: identified | PSNR"
        ),
        _attacks,
    ),
    "levels": (
        _head(
            "defense | picture | by | plain: picture | informed: picture | PSNR, dB (null) | not found: search failed · "
            "information gone | power"
        ),
        _leaks,
    ),
    "settings": (
        _head(
            "model | batch | local steps | attackers | identified | median PSNR, dB | SSIM | best by truth, dB | best null, dB"
        ),
        _settings,
    ),
    "summary": (
        _head(
            "defense | identified, strongest attacker | identified, attacker ignores it | identified, attacker knows it | "
            "median PSNR | best null"
        ),
        _summary,
    ),
    "accuracy": (
        _head("defense | accuracy, % | difference, points | PMM | bytes up | bytes both | client time"),
        _accuracy,
    ),
}
