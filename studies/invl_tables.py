"""The study of guided noise as tables in Markdown, from the documents of its rows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from gradveil.metrics.summary import wilson
from studies.invl_horizontal import last_common_round
from studies.shared import MISSING, short, table

__all__ = ["embeddings", "updates"]

UPDATES = {
    "Clean": ("none", "24.9 / .771, 72.5 %"),
    "Prune": ("Prune, 99.5 %", "16.2 / .410, 39.0 %"),
    "Dropout": ("Dropout, 99.5 %", "18.0 / .469, 33.1 %"),
    "DNP": ("DNP, δ = 0.07", "15.2 / .377, 63.4 %"),
    "DNP, matched": ("DNP, δ = 0.088 (ours)", MISSING),
    "InvL-DNP": ("InvL-DNP, δ = 0.08", "14.6 / .296, 64.2 %"),
    "GNP": ("GNP, δ = 0.15", "12.5 / .098, 70.7 %"),
    "InvL-GNP": ("InvL-GNP, δ = 0.25", "12.1 / .084, 71.2 %"),
    "InvL-GNP, public centres": ("InvL-GNP, public centres", MISSING),
}
"""Rows of updates: what they are called, and what the paper's Table 2 says, PSNR / SSIM and accuracy."""
COSTS = {"InvL-DNP": ("InvL-DNP, class basis",), "InvL-GNP": ("InvL-GNP", "InvL-GNP, kept basis")}
"""Whose cost a row shows, if not its own alone."""
EMBEDDINGS = {
    "Clean": "none",
    "Prune": "Prune 0.9",
    "Dropout": "Dropout 0.9",
    "DNP": "DNP, std 0.235",
    "ENP": "ENP, δ = 0.7",
    "ENP 0.3": "ENP, δ = 0.3",
    "ENP 0.1": "ENP, δ = 0.1",
    "ENP 0.03": "ENP, δ = 0.03",
    "InvL-ENP": "InvL-ENP, δ = 1, every record's basis",
    "InvL-ENP, public basis": "InvL-ENP, δ = 1, public basis",
}
Records = list[dict[str, Any]]


def _found(documents: Mapping[str, Any], scale: str) -> dict[tuple[str, str], Records]:
    """Return the documents of one size by part and title; those that only chose a strength are no rows."""
    found: dict[tuple[str, str], Records] = {}
    for name, each in documents.items():
        if name.startswith(f"{scale}/") and "calibration" not in name:
            found.setdefault((each["part"], each["title"]), []).append(each)
    return found


def updates(documents: Mapping[str, Any], scale: str) -> str:
    """Show Tables 2 and 4 of the paper: privacy, accuracy at the last round all trainings share, and cost."""
    found = _found(documents, scale)
    trainings = {title: own for (part, title), own in found.items() if part == "accuracy"}
    last = last_common_round([each for own in trainings.values() for each in own])
    timed = any(part == "cost" for part, _ in found)
    lines = []
    for title, (shown, paper) in UPDATES.items():
        attacked, trained = found.get(("attack", title), []), trainings.get(title, [])
        if not attacked and not trained:
            continue
        cells = [shown, *_sides(attacked), " and ".join(_nulls(attacked)) or MISSING]
        finals = [100 * dict(each["accuracy"])[last] for each in trained]
        cells.append(f"{fmean(finals):.1f} %{_basis(trained[0]['defense'])}, {len(finals)} seeds" if finals else MISSING)
        if timed:
            costs = [each for other in COSTS.get(title, (title,)) for each in found.get(("cost", other), [])]
            cells.append("; ".join(_cost(each) for each in costs) or ("1" if title == "Clean" else MISSING))
        lines.append([*cells, paper])
    head = ["defense, paper's setting", *(f"{side}: identified, PSNR / SSIM" for side in ("plain", "informed")), "null, PSNR"]
    head += [f"accuracy after {last} minibatches", *(["client time"] if timed else []), "paper: PSNR / SSIM, accuracy"]
    return table(head, lines)


def embeddings(documents: Mapping[str, Any], scale: str) -> str:
    """Show Table 3 of the paper: privacy, and accuracy with noise at prediction alone and in training too."""
    found = _found(documents, scale)
    lines = []
    for title, shown in EMBEDDINGS.items():
        attacked, trained = found.get(("attack", title), []), found.get(("accuracy", title), [])
        accuracies = [f"{100 * fmean(each['predicted'] for each in trained):.1f} %" if trained else MISSING]
        lines.append(
            [shown, sum(each["n"] for each in attacked), *_sides(attacked, "mse", "psnr", "ssim"), *accuracies, _final(trained)]
        )
    return table(
        "defense | n | plain: identified, MSE, PSNR / SSIM | informed: identified, MSE, PSNR / SSIM | "
        "accuracy, noise at prediction | accuracy, trained with it",
        lines,
    )


def _final(trained: Records) -> str:
    """Return accuracy after training with the defense, or why there is none."""
    if not trained:
        return MISSING
    if not trained[0]["trained"]:
        return "out of reach"
    if any(each["diverged"] for each in trained):
        return "diverged"
    return f"{100 * fmean(each['final_accuracy'] for each in trained):.1f} %{_basis(trained[0]['trained'], 'steps')}"


def _sides(attacked: Records, *metrics: str) -> list[str]:
    """Return what plain and informed attackers get; draws are added up, and of their medians the mean is taken."""
    return [_side(attacked, side, metrics or ("psnr", "ssim")) for side in ("plain", "informed")]


def _side(attacked: Records, side: str, metrics: Sequence[str]) -> str:
    if not attacked:
        return "not attacked"
    own = [each[side] for each in attacked]
    if any(each is None for each in own):
        return MISSING
    count, n = sum(each["identified"]["count"] for each in own), sum(each["n"] for each in attacked)
    low, high = wilson(count, n)
    means = {name: fmean(each[name]["median"] for each in own) for name in metrics}
    told = [f"{count} of {n} ({100 * low:.0f}–{100 * high:.0f} %)", *([short(means["mse"])] if "mse" in means else [])]
    return ", ".join([*told, f"{means['psnr']:.1f} / {short(means['ssim'])}"]) + _doubt(attacked, side)


def _doubt(attacked: Records, side: str) -> str:
    """Return a remark where the informed attacker knows the defense in part only: who knows more may find more."""
    checks = [check for each in attacked for check in each["checks"]]
    unsure = any(check["name"] == "informed_complete" and check["level"] != "ok" for check in checks)
    return " (incomplete)" if unsure and side == "informed" else ""


def _nulls(attacked: Records) -> list[str]:
    return sorted({f"{each['bar']['psnr']['value']:.1f}" for each in attacked})


def _basis(defense: str, counted: str = "rounds") -> str:
    """Return how long the basis was kept that a row was trained with, where it was kept; parties count steps."""
    kept = re.search(r"refresh=(\d+)", defense)
    kind = "class basis" if "'class'" in defense else "basis"
    return f" ({kind} of {kept[1]} {counted})" if kept and int(kept[1]) > 1 else ""


def _cost(record: Mapping[str, Any]) -> str:
    ratio = record["ratio"]
    return f"{ratio:.{0 if ratio >= 100 else 1}f}{_basis(record['defense'])}"
