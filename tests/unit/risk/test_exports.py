"""What the room offers: every public name of its tools, each the thing its module defines, none in the way of a module."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

from gradveil import risk

MODULES = [module.name for module in pkgutil.iter_modules(risk.__path__)]
TOOLS = {
    "invloss": {"MEANING", "InvLoss", "inversion_loss"},
    "invre": {"RiskScore", "rank_weights", "risk_score"},
    "fisher": {"diagonal_leakage", "fisher_leakage"},
    "exposure": {"Assessment", "DefendedRelease", "RecordRisk", "assess", "defended_release"},
    "calibration": {"Calibration", "built_in_calibration", "calibrate", "read_alpha"},
    "certificates": {"Certificate", "certificate_from", "certificate_of"},
    "linear_bayes": {"posterior_error"},
    "listed": {"named_first"},
    "oracle": {"expose"},
    "prior": {"Prior", "public_prior"},
    "mean_error": {"MeanErrorBound", "mean_error_bound", "mean_error_from_spectra", "smoothed_score"},
}


@pytest.mark.parametrize("module", TOOLS)
def test_a_tool_is_taken_from_its_module(module: str) -> None:
    home = importlib.import_module(f"gradveil.risk.{module}")
    for name in TOOLS[module]:
        assert name in home.__all__ and name in risk.__all__
        assert getattr(risk, name) is getattr(home, name)


def test_the_list_is_in_order_and_complete() -> None:
    assert len(set(risk.__all__)) == len(risk.__all__)
    assert all(hasattr(risk, name) for name in risk.__all__)
    defined = {name for module in MODULES for name in getattr(importlib.import_module(f"gradveil.risk.{module}"), "__all__", ())}
    assert set(risk.__all__) <= defined


def test_no_name_hides_a_module() -> None:
    """A function called as its module is would be found where ``import gradveil.risk.module`` looks for the module."""
    assert not set(risk.__all__) & set(MODULES)
