"""The study that asks whether exposure orders what attacks get: its correlations, and the tables made of its documents."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from studies.exposure_order import Release, _order, tables, units

GENERATOR = np.random.default_rng(5)
CONTRAST = GENERATOR.lognormal(size=128)
OWN = GENERATOR.normal(size=128)


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("studies.exposure_order.RESAMPLES", 60)


def test_what_contrast_explains_is_no_merit_and_what_it_does_not_is() -> None:
    by_contrast = 3 * np.log(CONTRAST)
    gains = by_contrast + OWN
    told = _order(OWN, gains, CONTRAST)
    assert told["partial"] > 0.85 and told["low"] > 0.8 and told["low"] < told["partial"] < told["high"] <= 1
    blind = _order(by_contrast + 0.1 * GENERATOR.normal(size=128), gains, CONTRAST)
    assert blind["plain"] > 0.85 and abs(blind["partial"]) < 0.3 and blind["low"] < 0 < blind["high"]
    assert _order(-OWN, gains, CONTRAST)["high"] < -0.8


def test_interval_narrows_with_records() -> None:
    gains = OWN + GENERATOR.normal(size=128)
    few, many = (_order(OWN[:n], gains[:n], CONTRAST[:n]) for n in (24, 128))
    assert many["high"] - many["low"] < few["high"] - few["low"]


def test_units_are_rungs_cuts_and_releases() -> None:
    settings = SimpleNamespace(
        laddered=["a", "b"],
        ladders={"Gaussian noise": ["gaussian_noise(std=0.1)"]},
        cuts={"a": ["cut1", "trained-cut1"]},
        releases=[{"place": "b", "defense": "none"}],
        rung_records=2,
        records=4,
    )
    assert units(settings) == [
        "a/Gaussian_noise/gaussian_noise_std_0.1",
        "b/Gaussian_noise/gaussian_noise_std_0.1",
        "a/cuts/cut1",
        "a/cuts/trained-cut1",
        "b/records/none",
    ]
    assert Release("a", "cuts", cut="cut2").unit == "a/cuts/cut2"


def document(defense: str, exposure: float, gains: dict[str, float], **more: object) -> dict[str, object]:
    about = {"place": "net", "ladder": "noise", "defense": defense, "cut": "", "trained": False, "n": 4, "null": 12.0}
    best = max(gains, key=lambda name: gains[name])
    return {**about, "scores": {"exposure": exposure, "linear": -exposure}, "gains": gains, "best": best, **more}


def test_a_ladder_is_ordered_by_the_best_attack_of_each_rung() -> None:
    found = {
        str(place): document(f"d{place}", score, {"wiener": gain, "linear_map": other})
        for place, (score, gain, other) in enumerate([(9.0, 8.0, 1.0), (5.0, 0.0, 6.0), (1.0, 2.0, -3.0)])
    }
    shown = tables(found)
    assert set(shown) == {"ladders", "rungs"}
    assert "| net | noise | 3 | 4 | 1.00 | -1.00 | 1.0 |" in shown["ladders"]
    assert (
        "9.0 / 5.0 / 1.0" in shown["rungs"] and "8.0 / 6.0 / 2.0" in shown["rungs"] and "Wiener / map / Wiener" in shown["rungs"]
    )


@pytest.mark.parametrize(("spread", "words"), [(3.0, "3.0 |"), (1.0, "1.0 (narrow)")])
def test_a_release_shows_the_best_attack_first(spread: float, words: str) -> None:
    order = {"partial": 0.5, "low": 0.3, "high": 0.7, "plain": 0.6}
    orders = {name: {"exposure": order, "linear": order, "contrast": 0.1} for name in ("wiener", "linear_map")}
    one = document("none", 5.0, {"wiener": 4.0, "linear_map": 6.0}, spread=spread, orders=orders) | {"ladder": ""}
    assert set(tables({"one": one})) == {"records"}
    shown = tables({"one": one})["records"]
    assert "map 6.0" in shown and words in shown and "+0.50 (+0.30 to +0.70)" in shown and "Wiener 4.0 dB +0.50" in shown
