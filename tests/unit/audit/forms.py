"""What the files of a results folder hold, as forms that a test compares them with."""

from __future__ import annotations

from typing import Any

import gradveil

# The format of docs/results-format.md. A dict has exactly these keys, a list any number of rows, a tuple alternatives.
NUMBER = (float, int)
PART = {"value": NUMBER, "low": NUMBER, "high": NUMBER, "count": int, "n": int}
SPREAD = {"median": NUMBER, "low": NUMBER, "high": NUMBER, "worst": NUMBER, "n": int}
NULL = {
    "n": int,
    "identified": PART,
    "psnr": SPREAD,
    "ssim": SPREAD,
    "mse": SPREAD,
    **dict.fromkeys(("lpips", "noise_fraction", "rdlv_nvflare"), (SPREAD, {"unavailable": str})),
    **dict.fromkeys(("iip_1", "iip_3", "iip_5"), PART),
}
NULLS = {"grey": NULL, "data_mean": NULL, "prior_only": NULL, "derangement": NULL}
SUMMARY = {**NULL, "label_accuracy": PART}
MAYBE = (*NUMBER, None)
GUARANTEE = {
    **{"epsilon": MAYBE, "delta": MAYBE, "unit": str, "noise_multiplier": MAYBE, "steps": int, "sampling_rate": NUMBER},
    **{"method": str, "assumptions": [str], "reason": str, "sentence": str},
}
CERTIFICATE = {
    **{"identified": MAYBE, "psnr": ({"15": NUMBER, "20": NUMBER, "25": NUMBER}, {}), "advantage": MAYBE, "unit": str},
    **{"noise_multiplier": MAYBE, "steps": int, "sampling_rate": NUMBER, "epsilon": MAYBE, "delta": MAYBE},
    **{"candidates": int, "chance": MAYBE, "label_known": bool, "confidence": NUMBER},
    **{"assumptions": [str], "reason": str, "sentence": str, "matching": (PART, None)},
    "mean_error": (
        {"mse": None, "reason": str},
        {
            **{"mse": NUMBER, "low": MAYBE, "high": MAYBE, "psnr": MAYBE, "n": int, "form": str, "confidence": NUMBER},
            **{"smoothing": NUMBER, "noise_std": NUMBER, "reason": ""},
        },
    ),
}
SIDE = {"mean": NUMBER, "worst": NUMBER, "high": NUMBER, "mode": str}
COEFFICIENT = ({"value": NUMBER, "p": NUMBER}, None)
RISK: dict[str, Any] = {
    **{"reason": "", "meaning": str, "alpha": NUMBER, "beta": NUMBER, "gap_rule": str, "noise_form": str, "notes": [str]},
    **{"defended": SIDE, "undefended": SIDE},
    "records": [
        {
            **{"pseudonym": str, "invre": NUMBER, "low": NUMBER, "high": NUMBER, "score": NUMBER},
            **{"undefended": NUMBER, "error": MAYBE, "contrast": NUMBER},
        }
    ],
    "correlation": {
        "attack": str,
        "pearson": COEFFICIENT,
        "spearman": COEFFICIENT,
        "contrast": COEFFICIENT,
        "partial": COEFFICIENT,
        "n": int,
    },
}
PARTS = {"n": int, **dict.fromkeys(("mse", "psnr", "ssim", "lpips"), (SPREAD, {"unavailable": str}))}
REGION = {"share": NUMBER, "area": NUMBER, **dict.fromkeys(("selected", "best_by_truth", "plain", "data_mean"), PARTS)}
BAR = {"null": str, "value": NUMBER, "high": NUMBER}
GAP = {"search_failed": PART, "information_gone": PART, "found": PART, "median": MAYBE, "objective": ("likelihood", "residual")}
NULL_BAR = ({**BAR, "draws": int}, BAR)
REACH = (
    {"attacker": str, "share": PART, "informed": bool, "rehearsed": NUMBER},
    {"attacker": str, "share": PART, "informed": bool},
)
LEVEL = {"share": PART, "attacker": str, "null": NULL_BAR, "reached": [REACH]}
SENSITIVITY = {"d": MAYBE, "low": MAYBE, "high": MAYBE, "at": {str(10**power): NUMBER for power in (1, 2, 3, 6)} | {"2": NUMBER}}
LISTED = {**LEVEL, "size": int, "sensitivity": SENSITIVITY}
LEVELS = {
    "label": LEVEL,
    "list": {"lists": dict.fromkeys(("random", "same_label", "nearest"), LISTED), "presence": LEVEL, "draws": int},
}
EXPOSURE = {
    **{"meaning": str, "mean": MAYBE, "worst": MAYBE, "mean_linear": MAYBE, "mean_listed": MAYBE, "mean_gain": MAYBE},
    **dict.fromkeys(("mean_attained", "worst_attained", "mean_by_label", "mean_rehearsed"), MAYBE),
    **{"public": {"source": str, "records": int, "rank": int, "kept": NUMBER}, "reason": str, "unlisted": str, "doubt": str},
    **{"range": str, "owners": list, "notes": [str]},
    "records": [
        {
            **{"pseudonym": str, "exposure": MAYBE, "linear": MAYBE, "null": NUMBER, "listed": MAYBE, "gain": MAYBE},
            **dict.fromkeys(("attained", "by_label", "rehearsed"), NUMBER),
        }
    ],
    "correlation": (RISK["correlation"], {name: form for name, form in RISK["correlation"].items() if name != "partial"}),
}
CELL: dict[str, Any] = {
    "format": "gradveil-cell-1",
    "key": str,
    "cell": dict,
    "defense": {
        "spelling": str,
        "parts": [str],
        "rung": (int, None),
        "rungs": int,
        "random": bool,
        "acts_on": [str],
        "secure_aggregation": bool,
        "guarantee": GUARANTEE,
        "measured": dict,
    },
    "threat": {"sees": str, "clients": int, "rounds": int, "knows": [str], "active": bool, "sentences": [str]},
    "n": int,
    "candidates": int,
    "chance": NUMBER,
    "selected": SUMMARY,
    "plain": (SUMMARY, None),
    "informed": (SUMMARY, None),
    "asked_steps": int,
    "levels": LEVELS,
    "best_by_truth": SUMMARY,
    "gap": GAP,
    "region": (REGION, {**REGION, "informed": PARTS}, {"unavailable": str}),
    "regret_db": {"median": NUMBER, "worst": NUMBER, "flagged": bool},
    "attackers": [{"recipe": str, "stance": str, "tries": int, "chosen": int, "rehearsal_psnr": NUMBER, "summary": SUMMARY}],
    "nulls": (NULLS, {**NULLS, "public_mean": NULL}),
    "bar": {"identified": (BAR, {**BAR, "draws": int}), "psnr": {"null": str, "value": NUMBER}},
    "records": [
        {
            "pseudonym": str,
            "owner": (str, None),
            "label": int,
            "label_correct": bool,
            "identified": bool,
            "rank": int,
            "psnr": NUMBER,
            "ssim": NUMBER,
            "mse": NUMBER,
            "lpips": (*NUMBER, None),
            "recipe": str,
            "stance": str,
            "regret_db": NUMBER,
            "gap": MAYBE,
        }
    ],
    "checks": [{"name": str, "level": ("ok", "warn", "fail"), "sentence": str, "remedy": str}],
    "bytes": {"up": int, "dense": int},
    "certificate": CERTIFICATE,
    "risk": (RISK, {"reason": str, "meaning": str}, None),
    "exposure": EXPOSURE,
}
DEFENDED = {**CELL, "informed_by": ("own", "generic", "none"), "informed_gain": {"first": int, "second": int, "p": NUMBER}}
# What the document names and small cells lack: copies, owners, records that share their luck.
SOMETIMES = {"duplicates": int, "owners": LEVEL, "owners_null": BAR, "effective": NUMBER, "unattained": str}
TIMING = {
    **{"key": str, "seconds": NUMBER, "attack_steps": int, "steps_per_second": NUMBER},
    **{"risk_seconds": NUMBER, "peak_memory_mb": int, "defense_ms": NUMBER, "undefended_ms": NUMBER},
}
RUN: dict[str, Any] = {
    "format": "gradveil-run-1",
    "version": gradveil.__version__,
    "title": str,
    "command": str,
    "plan": dict,
    "cells": [str],
    "builtin_data": bool,
    "not_tested": [str],
    "provenance": dict,
    "cards": {"defenses": dict, "attacks": dict, "metrics": dict},
}
