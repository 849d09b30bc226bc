"""Gradveil: know what federated-learning updates reveal about the training data, and stop it.

Names load on first use, so ``import gradveil`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradveil.errors import BadUpdate as BadUpdate
    from gradveil.errors import DefenseOrder as DefenseOrder
    from gradveil.errors import GradveilError as GradveilError
    from gradveil.errors import LeakAboveLimit as LeakAboveLimit
    from gradveil.errors import MissingKnowledge as MissingKnowledge
    from gradveil.errors import Unreliable as Unreliable
    from gradveil.errors import UnsupportedModel as UnsupportedModel
    from gradveil.errors import UsageError as UsageError
    from gradveil.randomness import Seed as Seed
    from gradveil.records import Batch as Batch
    from gradveil.records import Knowledge as Knowledge
    from gradveil.records import ModelSpec as ModelSpec
    from gradveil.records import Observation as Observation
    from gradveil.records import Payload as Payload
    from gradveil.records import Reconstruction as Reconstruction
    from gradveil.records import ThreatModel as ThreatModel
    from gradveil.records import Update as Update

__version__ = "0.1.0"

# Read by __getattr__; type checkers read the block above. A test keeps the two equal.
_PUBLIC = {
    "BadUpdate": "gradveil.errors",
    "Batch": "gradveil.records",
    "DefenseOrder": "gradveil.errors",
    "GradveilError": "gradveil.errors",
    "Knowledge": "gradveil.records",
    "LeakAboveLimit": "gradveil.errors",
    "MissingKnowledge": "gradveil.errors",
    "ModelSpec": "gradveil.records",
    "Observation": "gradveil.records",
    "Payload": "gradveil.records",
    "Reconstruction": "gradveil.records",
    "Seed": "gradveil.randomness",
    "ThreatModel": "gradveil.records",
    "Unreliable": "gradveil.errors",
    "UnsupportedModel": "gradveil.errors",
    "Update": "gradveil.records",
    "UsageError": "gradveil.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        from gradveil.errors import suggest

        raise AttributeError(f"module 'gradveil' has no attribute {name!r}{suggest(name, _PUBLIC)}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
