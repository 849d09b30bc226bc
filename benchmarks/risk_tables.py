"""The study of risk scores as tables in Markdown, from the files of its parts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

PREDICTORS = {
    "invre": "InvRE",
    "relative": "relative (1 / score)",
    "fil": "σ_1 (FIL)",
    "dfil": "‖J‖²/m (dFIL)",
    "variation": "total variation of the picture",
}
Z95 = 1.959964
DEFENDED_SCENE, DEFENDED_VALUES = "resnet20-cut1", 16_384
"""What Figure 8 is about, and the size of its embedding."""
FEW = 16
"""Pictures of Figures 5 and 6."""
NULLS = "nulls"
"""The part that holds what guesses without an update score."""

Picture = tuple[int, int]
"""How many test pictures a file had, and the row in their shuffled order: the same row of another file is another picture."""


def tables(folder: Path) -> str:
    """Return all tables whose parts are there."""
    parts = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("fig*.json"))]
    trained = folder / "lenet-trained.txt"
    notes = (
        f"\nThe trained LeNet is right on {100 * float(trained.read_text()):.1f} % of test pictures.\n"
        if trained.exists()
        else ""
    )
    spent = sum(part["cpu"] for part in parts)
    end = (
        f"\n{len(parts)} parts, {spent / 60:.0f} CPU minutes, torch {parts[0]['torch']}.\n" if parts else "nothing measured yet\n"
    )
    blank = {
        (part["test_pictures"], record["row"]): record
        for part in (json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(f"{NULLS}*.json")))
        for record in part["found"]
    }
    figures = [_defenses(parts, figure, blank) for figure in ("fig7", "fig8")]
    return "\n".join([_correlations(parts), *_null_note(parts, blank), notes, _choice(parts), *figures, end])


def _null_note(parts: list[dict[str, Any]], blank: dict[Picture, dict[str, Any]]) -> list[str]:
    seen = {picture for subject in _subjects(parts, "fig3") for picture in _joined(parts, "fig3", "risk", subject)}
    chosen = [blank[picture] for picture in seen if picture in blank]
    told = ", ".join(
        f"{name} {_psnr(float(np.median([record[name] for record in chosen])))} dB" for name in ("grey", "data mean") if chosen
    )
    return [f"Guesses that see nothing, median of {len(chosen)} pictures of the {len(seen)}: {told}."] if chosen else []


def _joined(parts: list[dict[str, Any]], figure: str, job: str, subject: str, attack: str = "") -> dict[Picture, dict[str, Any]]:
    """Return the records of all shards of a job, by picture."""
    chosen = [
        p for p in parts if p["part"].startswith(figure) and (p["job"], p["subject"], p["attack"]) == (job, subject, attack)
    ]
    found = {(part["test_pictures"], record["row"]): record for part in chosen for record in part["found"]}
    return found if job != "risk" or figure != "fig" else _undefended(parts, subject) | found


def _undefended(parts: list[dict[str, Any]], subject: str) -> dict[Picture, dict[str, Any]]:
    """Return the scores that Figure 8 has of its scene without a defense: more pictures of Figure 6."""
    chosen = [part for part in parts if part["part"].startswith("fig8-none")] if subject == DEFENDED_SCENE else []
    return {
        (part["test_pictures"], record["row"]): {"invre": record["paper"], "outputs": DEFENDED_VALUES}
        for part in chosen
        for record in part["found"]["records"]
    }


def _subjects(parts: list[dict[str, Any]], figure: str) -> list[str]:
    return list(dict.fromkeys(part["subject"] for part in parts if part["part"].startswith(figure) and part["job"] == "attack"))


def _expected(record: dict[str, Any]) -> float:
    counts = np.array(sorted(int(count) for count in record["mse"]))
    likely = 1 / counts.cumsum()
    return float((likely / likely.sum()) @ np.array([record["mse"][str(count)] for count in counts]))


OUTCOMES: dict[str, Callable[[dict[str, Any]], float]] = {
    "E[MSE]": _expected,
    "final MSE": lambda record: float(record["final"]),
    "E[MSE] / mean x²": lambda record: _expected(record) / max(record["energy"], 1e-9),
}


def _correlations(parts: list[dict[str, Any]]) -> str:
    lines = ["### Per-record risk against attack error (Fig. 3)", ""]
    lines.append(
        "Pearson's r with its 95 % interval and p, Spearman's ρ and p. The paper has r of -0.41 to -0.67 for InvRE; higher risk "
        "should mean lower error, so all but the last column should be negative."
    )
    head = ["shared", "attack", "error", "n", "InvRE: r [95 %], p", "InvRE: ρ, p"]
    head += [f"{title}: r / ρ" for name, title in PREDICTORS.items() if name != "invre"]
    lines += ["", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for subject in _subjects(parts, "fig3"):
        risk = _joined(parts, "fig3", "risk", subject)
        for attack in ("dlg", "ig"):
            errors = _joined(parts, "fig3", "attack", subject, attack)
            rows = sorted(set(risk) & set(errors))
            if len(rows) < 4:
                continue
            for title, outcome in OUTCOMES.items():
                y = np.array([outcome(errors[row]) for row in rows])
                cells = [subject, attack, title, str(len(rows))]
                x = np.array([risk[row]["invre"] for row in rows])
                cells += [_pearson(x, y), _spearman(x, y)]
                for name in (name for name in PREDICTORS if name != "invre"):
                    x = np.array([risk[row][name] for row in rows])
                    cells.append(f"{_r(stats.pearsonr(x, y))} / {_r(stats.spearmanr(x, y))}" if _varies(x, y) else "–")
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *_spreads(parts)])


def _spreads(parts: list[dict[str, Any]]) -> list[str]:
    """How much the measures differ between records: what hardly varies cannot rank."""
    lines = [
        "| shared | n | InvRE, mean ± sd | score, mean ± sd | dlg: median final MSE | ig: median final MSE |",
        "|" + "---|" * 6,
    ]
    for subject in _subjects(parts, "fig3"):
        risk = _joined(parts, "fig3", "risk", subject)
        if not risk:
            continue
        cells = [subject, str(len(risk))]
        for name in ("invre", "score"):
            values = np.array([record[name] for record in risk.values()])
            cells.append(f"{values.mean():.4f} ± {values.std(ddof=1) if len(values) > 1 else 0:.4f}")
        for attack in ("dlg", "ig"):
            errors = _joined(parts, "fig3", "attack", subject, attack)
            cells.append(f"{np.median([record['final'] for record in errors.values()]):.2e}" if errors else "–")
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def _varies(x: Any, y: Any) -> bool:
    return float(np.ptp(x)) > 0 and float(np.ptp(y)) > 0


def _r(found: Any) -> str:
    return f"{found.statistic:+.2f}"


def _pearson(x: Any, y: Any) -> str:
    if not _varies(x, y):
        return "– (constant)"
    found = stats.pearsonr(x, y)
    middle, half = np.arctanh(np.clip(found.statistic, -0.999999, 0.999999)), Z95 / np.sqrt(max(1, len(x) - 3))
    return f"{found.statistic:+.2f} [{np.tanh(middle - half):+.2f}, {np.tanh(middle + half):+.2f}], {found.pvalue:.0e}"


def _spearman(x: Any, y: Any) -> str:
    if not _varies(x, y):
        return "– (constant)"
    found = stats.spearmanr(x, y)
    return f"{found.statistic:+.2f}, {found.pvalue:.0e}"


def _choice(parts: list[dict[str, Any]]) -> str:
    """Architectures and cuts, most risky first by InvRE, with the place the attacks give them."""
    lines = ["### Order of architectures and cuts (Fig. 5 and 6)", ""]
    families: dict[str, list[str]] = {}
    cuts = [subject for subject in _subjects(parts, "fig3") if "-cut" in subject]
    for subject in sorted({*_subjects(parts, "fig56"), *cuts}):
        families.setdefault(subject.rpartition("-cut")[0] + " cuts" if "-cut" in subject else "architectures", []).append(subject)
    for family, subjects in families.items():
        rows = []
        # Figure 3 has more pictures of some of the same cuts, at the same weights and by the same attacks.
        pictures = {subject: _attacked_pictures(parts, subject) for subject in subjects}
        pictures = {subject: found for subject, found in pictures.items() if found}
        shared = set.intersection(*pictures.values()) if "-cut" in subjects[0] and pictures else set()
        for subject in pictures:
            # The order of cuts is told on the same pictures wherever there are any.
            both = sorted(shared or pictures[subject])
            risk = _joined(parts, "fig", "risk", subject)
            errors = {attack: _joined(parts, "fig", "attack", subject, attack) for attack in ("dlg", "ig")}
            risk = {row: risk[row] for row in both}
            errors = {attack: {row: found[row] for row in both} for attack, found in errors.items()}
            best = [min(errors[a][row]["final"] for a in errors) for row in both]
            invre = np.array([record["invre"] for record in risk.values()])
            expected = {a: float(np.mean([_expected(record) for record in errors[a].values()])) for a in errors}
            rows.append((subject, len(risk), invre, expected, float(np.mean(best)), next(iter(risk.values()))["outputs"]))
        if not rows:
            continue
        rows.sort(key=lambda row: -float(row[2].mean()))
        lines += [
            f"| {family} | values shared | n | InvRE, mean ± sd | dlg: E[MSE] | ig: E[MSE] | best attack: mean MSE | PSNR, dB |",
            "|" + "---|" * 8,
        ]
        for subject, n, invre, expected, best_error, outputs in rows:
            spread = invre.std(ddof=1) if n > 1 else 0.0
            psnr = 10 * np.log10(1 / max(best_error, 1e-12))
            lines.append(
                f"| {subject} | {outputs:,} | {n} | {invre.mean():.3f} ± {spread:.3f} | {expected['dlg']:.4f} | "
                f"{expected['ig']:.4f} | {best_error:.2e} | {psnr:.1f} |"
            )
        if len(rows) > 2:
            found = stats.spearmanr([float(row[2].mean()) for row in rows], [row[4] for row in rows])
            lines.append(f"\nSpearman's ρ of mean InvRE and the best attack's error over these {len(rows)}: {_r(found)}.")
        lines.append("")
    return "\n".join(lines)


def _attacked_pictures(parts: list[dict[str, Any]], subject: str) -> set[Picture]:
    """Return the first pictures that were scored and attacked both ways."""
    found = [set(_joined(parts, "fig", "risk", subject))]
    found += [set(_joined(parts, "fig", "attack", subject, attack)) for attack in ("dlg", "ig")]
    return {picture for picture in set.intersection(*found) if picture[1] < FEW}


def _null_lines(blank: dict[Picture, dict[str, Any]], rows: list[Picture], columns: int) -> list[str]:
    """What guesses that see nothing score on the same pictures, file by file."""
    lines = []
    for count in sorted({count for count, _ in rows}):
        own = [picture for picture in rows if picture[0] == count]
        chosen = [blank[picture] for picture in own if picture in blank]
        if len(chosen) < len(own):
            continue
        for name in ("grey", "data mean"):
            error = float(np.mean([record[name] for record in chosen]))
            middle = " | ".join(["–"] * (columns - 4))
            lines.append(f"| null: {name} ({count} test pictures) | {len(own)} | {middle} | {error:.2e} | {_psnr(error)} |")
    return lines


def _psnr(error: float) -> str:
    return f"{10 * np.log10(1 / max(error, 1e-12)):.1f}"


def _defenses(parts: list[dict[str, Any]], figure: str, blank: dict[Picture, dict[str, Any]]) -> str:
    title = "gradients of LeNet (Fig. 7)" if figure == "fig7" else "embeddings of ResNet-20, cut 1 (Fig. 8)"
    lines = [f"### InvRE against the strength of defenses: {title}", ""]
    head = [
        "defense",
        "n",
        "InvRE (paper's noise term)",
        "InvRE (noise of the inverse)",
        "informed dlg: MSE",
        "informed ig: MSE",
        "PSNR, dB",
    ]
    lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    told: set[str] = set()
    # Shards of one strength, as fig8-noise-0.1, are one line.
    strengths: dict[str, list[dict[str, Any]]] = {}
    for part in (part for part in parts if part["part"].startswith(figure)):
        strengths.setdefault(part["part"].partition(".")[0], []).append(part)
    seen: set[Picture] = set()
    for stem, shards in sorted(strengths.items(), key=lambda item: (not item[0].endswith("-none"), item[0])):
        records = [record for part in shards for record in part["found"]["records"]]
        told |= {note for part in shards for note in part["found"]["notes"]}
        seen |= {(part["test_pictures"], record["row"]) for part in shards for record in part["found"]["records"]}
        mean = {name: float(np.mean([record[name] for record in records])) for name in ("paper", "inverse", "dlg", "ig")}
        best = float(np.mean([min(record["dlg"], record["ig"]) for record in records]))
        files = " and ".join(str(count) for count in sorted({part["test_pictures"] for part in shards}))
        name = "none" if stem.endswith("-none") else shards[0]["found"]["defense"]
        scores = f"{mean['paper']:.3f} | {mean['inverse']:.3f}"
        errors = f"{mean['dlg']:.2e} | {mean['ig']:.2e} | {_psnr(best)}"
        lines.append(f"| {name} ({files} test pictures) | {len(records)} | {scores} | {errors} |")
    lines += _null_lines(blank, sorted(seen), len(head))
    return "\n".join([*lines, "", *(f"* {note}" for note in sorted(told)), ""])
