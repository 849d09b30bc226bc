"""Gradveil: know what federated-learning updates reveal about the training data, and stop it.

Names load on first use, so ``import gradveil`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradveil.attacks import Attack as Attack
    from gradveil.data import load_data as load_data
    from gradveil.defenses import ClientView as ClientView
    from gradveil.defenses import Defense as Defense
    from gradveil.defenses import DefenseCard as DefenseCard
    from gradveil.defenses import build_defense as build_defense
    from gradveil.errors import BadUpdate as BadUpdate
    from gradveil.errors import DefenseOrder as DefenseOrder
    from gradveil.errors import GradveilError as GradveilError
    from gradveil.errors import LeakAboveLimit as LeakAboveLimit
    from gradveil.errors import MissingKnowledge as MissingKnowledge
    from gradveil.errors import Unreliable as Unreliable
    from gradveil.errors import UnsupportedModel as UnsupportedModel
    from gradveil.errors import UsageError as UsageError
    from gradveil.federation import run_training as run_training
    from gradveil.learning import Learner as Learner
    from gradveil.models import build_model as build_model
    from gradveil.randomness import Seed as Seed
    from gradveil.records import Batch as Batch
    from gradveil.records import Knowledge as Knowledge
    from gradveil.records import ModelSpec as ModelSpec
    from gradveil.records import Observation as Observation
    from gradveil.records import Payload as Payload
    from gradveil.records import Reconstruction as Reconstruction
    from gradveil.records import ThreatModel as ThreatModel
    from gradveil.records import Update as Update
    from gradveil.report import write_report as write_report
    from gradveil.run.exposure import assess_risk as assess_risk
    from gradveil.run.pool import run_audit as run_audit
    from gradveil.study.federation import FederationSettings as FederationSettings
    from gradveil.study.plan import Plan as Plan
    from gradveil.study.run_result import Run as Run
    from gradveil.verdict.recommend import recommend as recommend

__version__ = "0.1.0"

# Read by __getattr__; type checkers read the block above. A test keeps the two equal.
_PUBLIC = {
    "Attack": "gradveil.attacks",
    "BadUpdate": "gradveil.errors",
    "Batch": "gradveil.records",
    "ClientView": "gradveil.defenses",
    "Defense": "gradveil.defenses",
    "DefenseCard": "gradveil.defenses",
    "DefenseOrder": "gradveil.errors",
    "FederationSettings": "gradveil.study.federation",
    "GradveilError": "gradveil.errors",
    "Knowledge": "gradveil.records",
    "LeakAboveLimit": "gradveil.errors",
    "Learner": "gradveil.learning",
    "MissingKnowledge": "gradveil.errors",
    "ModelSpec": "gradveil.records",
    "Observation": "gradveil.records",
    "Payload": "gradveil.records",
    "Plan": "gradveil.study.plan",
    "Reconstruction": "gradveil.records",
    "Run": "gradveil.study.run_result",
    "Seed": "gradveil.randomness",
    "ThreatModel": "gradveil.records",
    "Unreliable": "gradveil.errors",
    "UnsupportedModel": "gradveil.errors",
    "Update": "gradveil.records",
    "UsageError": "gradveil.errors",
    "assess_risk": "gradveil.run.exposure",
    "build_defense": "gradveil.defenses",
    "build_model": "gradveil.models",
    "load_data": "gradveil.data",
    "recommend": "gradveil.verdict.recommend",
    "run_audit": "gradveil.run.pool",
    "run_training": "gradveil.federation",
    "write_report": "gradveil.report",
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        from gradveil.errors import suggest

        raise AttributeError(f"module 'gradveil' has no attribute {name!r}{suggest(name, _PUBLIC)}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*_PUBLIC, "__version__"})
