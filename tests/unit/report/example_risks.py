"""Makes scores of risk that look like real ones: spread over the records, and lower under noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from scipy import stats


def side(values: Sequence[float]) -> dict[str, Any]:
    """Return the summary of one side."""
    return {"mean": sum(values) / len(values), "worst": max(values), "high": max(values) + 0.01, "mode": "leading"}


def risk(spelling: str, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return RISK of docs/results-format.md for the records of a cell."""
    bare = [0.44 + 0.09 * math.sin(2.3 * i + 0.4) for i in range(len(records))]
    own = [value - (0.05 if "noise" in spelling else 0.0) - (0.3 if "0.1" in spelling else 0.0) for value in bare]
    errors = [float(record["mse"]) for record in records]
    tests = {"pearson": stats.pearsonr(own, errors), "spearman": stats.spearmanr(own, errors)}
    return {
        **{"reason": "", "meaning": "A high score warns, and a low one does not acquit", "alpha": 0.99, "beta": 5.0},
        **{"gap_rule": "merge", "noise_form": "inverse", "defended": side(own), "undefended": side(bare)},
        "records": [
            {
                **{"pseudonym": record["pseudonym"], "invre": value, "low": value - 0.01, "high": value + 0.01, "score": 0.97},
                **{"undefended": undefended, "error": error, "contrast": 0.05 + 0.01 * math.cos(value)},
            }
            for record, value, undefended, error in zip(records, own, bare, errors, strict=True)
        ],
        "correlation": {
            "attack": "plain" if spelling == "none" else "informed",
            **{name: {"value": float(test.statistic), "p": float(test.pvalue)} for name, test in tests.items()},
            "contrast": {"value": 0.85, "p": 0.0001},
            "partial": {"value": -0.2, "p": 0.47},
            "n": len(records),
        },
        "notes": [],
    }


def exposure(spelling: str, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return EXPOSURE of docs/results-format.md for the records of a cell; clipping has none."""
    none, nulls = spelling.startswith("clipping"), [0.05 + 0.01 * math.cos(i) for i in range(len(records))]
    own = [9.0 + math.sin(1.7 * i) - (4.0 if "0.1" in spelling else 0.0) for i in range(len(records))]
    return {
        "public": {"source": "photos, not attacked", "records": 600, "rank": 128, "kept": 0.9},
        "reason": "no decibels, attack it instead: made up" if none else "",
        "unlisted": "no number of a list: made up" if none else "",
        "records": [
            {
                **{"pseudonym": record["pseudonym"], "null": null, "gain": 10 * math.log10(null / float(record["mse"]))},
                **{"attained": value - 2.0, "by_label": 0.7, "rehearsed": 5.3, "owner": record["owner"]},
                **({} if none else {"exposure": value, "linear": value + 0.5, "listed": 0.75}),
            }
            for record, value, null in zip(records, own, nulls, strict=True)
        ],
        "correlation": {"attack": "informed", "spearman": {"value": 0.61, "p": 0.012}, "n": 0 if none else len(records)},
        "notes": ["7 other records of the update count as noise"] if "0.1" in spelling else [],
    }
