"""The study of risk scores as tables in Markdown, from the documents of its parts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from scipy import stats

from gradveil.audit.risks import correlate
from studies.shared import MISSING, table

__all__ = ["NULLS", "defenses", "nulls_of", "order", "records"]

Z95 = 1.959964
DEFENDED_SCENE, DEFENDED_VALUES = "resnet20-cut1", 16_384
"""What Figure 8 is about, and the size of its embedding."""
FEW = 16
"""Pictures of Figures 5 and 6."""
NULLS = "nulls"
"""The part that holds what guesses without an update score."""
TITLES = {
    "mlp": "gradient, MLP, untrained",
    "lenet": "gradient, LeNet, untrained",
    "lenet-trained": "gradient, LeNet, trained",
    "convnet": "gradient, ConvNet, untrained",
    "resnet20": "gradient, ResNet-20, untrained",
    **{f"resnet20-cut{i}": f"embedding, ResNet-20 cut {i}, untrained" for i in (1, 2, 3)},
    **{f"resnet20-trained-cut{i}": f"embedding, ResNet-20 cut {i}, trained" for i in (1, 2, 3)},
    **{f"resnet18-cut{i}": f"embedding, ResNet-18 cut {i}, untrained" for i in (1, 2, 3)},
}
ATTACKS = {"dlg": "DLG", "ig": "IG"}
HIGH = 60.0
"""Above so many decibels the rest is rounding."""

Picture = tuple[int, int]
"""How many test pictures a file had, and the row in their shuffled order: the same row of another file is another picture."""
Parts = list[Mapping[str, Any]]
Blank = dict[Picture, Mapping[str, Any]]


def nulls_of(parts: Parts) -> Blank:
    """Return what guesses that see nothing score, by picture."""
    chosen = [part for part in parts if part["part"].startswith(NULLS)]
    return {(part["test_pictures"], record["row"]): record for part in chosen for record in part["found"]}


def _joined(parts: Parts, figure: str, job: str, subject: str, attack: str = "") -> dict[Picture, dict[str, Any]]:
    """Return the records of all shards of a job, by picture."""
    chosen = [
        p for p in parts if p["part"].startswith(figure) and (p["job"], p["subject"], p["attack"]) == (job, subject, attack)
    ]
    found = {(part["test_pictures"], record["row"]): record for part in chosen for record in part["found"]}
    return found if job != "risk" or figure != "fig" else _undefended(parts, subject) | found


def _undefended(parts: Parts, subject: str) -> dict[Picture, dict[str, Any]]:
    """Return the scores that Figure 8 has of its scene without a defense: more pictures of Figure 6."""
    chosen = [part for part in parts if part["part"].startswith("fig8-none")] if subject == DEFENDED_SCENE else []
    return {
        (part["test_pictures"], record["row"]): {"invre": record["paper"], "outputs": DEFENDED_VALUES}
        for part in chosen
        for record in part["found"]["records"]
    }


def _subjects(parts: Parts, figure: str) -> list[str]:
    attacked = {part["subject"] for part in parts if part["part"].startswith(figure) and part["job"] == "attack"}
    return [subject for subject in TITLES if subject in attacked]


def _expected(record: Mapping[str, Any]) -> float:
    counts = np.array(sorted(int(count) for count in record["mse"]))
    likely = 1 / counts.cumsum()
    return float((likely / likely.sum()) @ np.array([record["mse"][str(count)] for count in counts]))


OUTCOMES: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "E[MSE]": _expected,
    "final MSE": lambda record: float(record["final"]),
    "E[MSE] / mean x²": lambda record: _expected(record) / max(record["energy"], 1e-9),
}


def records(parts: Parts) -> str:
    """Show per-record risk against attack error, beside the null and what the score adds to it: Figure 3.

    The null is the picture's contrast: its squared distance from the mean of the training pictures, which takes no model.
    """
    lines, blank = [], nulls_of(parts)
    for subject in _subjects(parts, "fig3"):
        risk = _joined(parts, "fig3", "risk", subject)
        for attack, title in ATTACKS.items():
            errors = _joined(parts, "fig3", "attack", subject, attack)
            rows = sorted(set(risk) & set(errors))
            if len(rows) < 4:
                continue
            y = {name: np.array([outcome(errors[row]) for row in rows]) for name, outcome in OUTCOMES.items()}
            invre, variation = (np.array([risk[row][name] for row in rows]) for name in ("invre", "variation"))
            contrast = [float(blank[row]["data mean"]) for row in rows] if set(rows) <= set(blank) else []
            told = correlate(invre.tolist(), y["E[MSE]"].tolist(), contrasts=contrast)
            ranks = [
                MISSING if found is None else f"{found.value:+.2f}" for found in (told.spearman, told.contrast, told.partial)
            ]
            later = [
                _pearson(x, y[name]) for x, name in ((invre, "final MSE"), (invre, "E[MSE] / mean x²"), (variation, "final MSE"))
            ]
            lines.append([TITLES[subject], title, len(rows), _pearson(invre, y["E[MSE]"], interval=True), *ranks, *later])
    return table(
        "shared | attack | n | InvRE with E[MSE]: r | ρ | null, contrast with E[MSE]: ρ | InvRE with E[MSE], given contrast: ρ | "
        "InvRE with final MSE: r | InvRE with E[MSE] / mean x²: r | "
        "total variation of the picture with final MSE: r",
        lines,
    )


def _varies(x: Any, y: Any) -> bool:
    return float(np.ptp(x)) > 0 and float(np.ptp(y)) > 0


def _r(found: Any) -> str:
    return f"{found.statistic:+.2f}"


def _pearson(x: Any, y: Any, *, interval: bool = False) -> str:
    if not _varies(x, y):
        return MISSING
    found = stats.pearsonr(x, y)
    middle, half = np.arctanh(np.clip(found.statistic, -0.999999, 0.999999)), Z95 / np.sqrt(max(1, len(x) - 3))
    return _r(found) + (f" ({np.tanh(middle - half):+.2f} to {np.tanh(middle + half):+.2f})" if interval else "")


def order(parts: Parts) -> str:
    """Show architectures and cuts, with scores and what attacks get: Figures 5 and 6."""
    cuts = [subject for subject in _subjects(parts, "fig3") if "-cut" in subject]
    families: dict[str, list[str]] = {}
    for subject in (subject for subject in TITLES if subject in {*_subjects(parts, "fig56"), *cuts}):
        families.setdefault(subject.rpartition("-cut")[0] + " cuts" if "-cut" in subject else "architectures", []).append(subject)
    lines = []
    for subjects in families.values():
        # Figure 3 has more pictures of some of the same cuts, at the same weights and by the same attacks.
        pictures = {subject: _attacked_pictures(parts, subject) for subject in subjects}
        pictures = {subject: found for subject, found in pictures.items() if found}
        shared = set.intersection(*pictures.values()) if "-cut" in subjects[0] and pictures else set()
        # The order of cuts is told on the same pictures wherever there are any.
        lines += [_order_line(parts, subject, sorted(shared or pictures[subject])) for subject in pictures]
    return table("shared | values | n | InvRE, mean ± sd | best attack, PSNR in dB", lines)


def _order_line(parts: Parts, subject: str, both: list[Picture]) -> list[object]:
    risk = _joined(parts, "fig", "risk", subject)
    errors = [_joined(parts, "fig", "attack", subject, attack) for attack in ATTACKS]
    best = float(np.mean([min(found[row]["final"] for found in errors) for row in both]))
    invre = np.array([risk[row]["invre"] for row in both])
    spread = float(invre.std(ddof=1)) if len(both) > 1 else 0.0
    digits = 3 if spread >= 5e-4 else 5
    told = f"{invre.mean():.{digits}f} ± {spread:.{digits}f}"
    return [TITLES[subject], f"{risk[both[0]]['outputs']:,}", len(both), told, _psnr(best)]


def _attacked_pictures(parts: Parts, subject: str) -> set[Picture]:
    """Return the first pictures that were scored and attacked both ways."""
    found = [set(_joined(parts, "fig", "risk", subject))]
    found += [set(_joined(parts, "fig", "attack", subject, attack)) for attack in ATTACKS]
    return {picture for picture in set.intersection(*found) if picture[1] < FEW}


def _psnr(error: float) -> str:
    value = float(10 * np.log10(1 / max(error, 1e-12)))
    return f"above {HIGH:.0f}" if value > HIGH else f"{value:.1f}"


def defenses(parts: Parts, figure: str) -> str:
    """Show scores and what informed attackers get against the strengths of every defense: Figures 7 and 8."""
    # Shards of one strength, as fig8-noise-0.1, are one strength, and strengths of one defense are one line.
    kinds: dict[str, dict[str, Parts]] = {}
    for part in (part for part in parts if part["part"].startswith(figure)):
        stem = part["part"].partition(".")[0]
        kinds.setdefault(re.sub(r"-\d+$", "", stem), {}).setdefault(stem, []).append(part)
    lines, seen = [], set()
    for stem, strengths in sorted(kinds.items(), key=lambda item: (not item[0].endswith("-none"), item[0])):
        scored = [[record for part in shards for record in part["found"]["records"]] for shards in strengths.values()]
        told = {form: " / ".join(f"{np.mean([each[form] for each in some]):.3f}" for some in scored) for form in FORMS}
        best = " / ".join(_psnr(float(np.mean([min(each["dlg"], each["ig"]) for each in some]))) for some in scored)
        own = {
            (part["test_pictures"], each["row"])
            for shards in strengths.values()
            for part in shards
            for each in part["found"]["records"]
        }
        seen |= own
        counts = " and ".join(f"{len(scored[0])} of {count}" for count in sorted({count for count, _ in own}))
        inverse = told["inverse"] if told["inverse"] != told["paper"] or stem.endswith("-none") else "the same"
        names = [shards[0]["found"]["defense"] for shards in strengths.values()]
        lines.append(["none" if stem.endswith("-none") else _strengths(names), counts, told["paper"], inverse, best])
    return table(
        "defense | test pictures | InvRE, noise as in the paper | InvRE, `--noise-form inverse` | best attack, PSNR in dB",
        [*lines, *_null_lines(nulls_of(parts), seen)],
    )


FORMS = ("paper", "inverse")


def _strengths(names: list[str]) -> str:
    """Return ``pruning`` 0.5 / 0.8 for the spellings of one defense."""
    spelt = [re.fullmatch(r"(?:embedding )?(\w+)[( ](?:\w+=)?([\w.+-]+)\)?", name) for name in names]
    if not all(spelt):
        return " / ".join(names)
    title = f"`{spelt[0][1]}`" if "(" in names[0] else spelt[0][1]  # type: ignore[index]
    return f"{title} {' / '.join(f'{float(each[2]):g}' for each in spelt if each)}"


def _null_lines(blank: Blank, seen: set[Picture]) -> list[list[str]]:
    """Return what guesses that see nothing score on the same pictures, file by file."""
    lines = []
    for count in sorted({count for count, _ in seen}):
        own = sorted(picture for picture in seen if picture[0] == count)
        chosen = [blank[picture] for picture in own if picture in blank]
        if len(chosen) == len(own):
            errors = [float(np.mean([record[name] for record in chosen])) for name in ("grey", "data mean")]
            told = " / ".join(_psnr(error) for error in errors)
            lines.append(["null: grey / mean of the training pictures", f"{len(own)} of {count}", MISSING, MISSING, told])
    return lines
