"""Attacks: everything an attacker can do with what it saw. Never imports data, defenses or federation."""

from gradveil.attacks.base import ATTACKS, Attack, AttackCard, Desk, launch
from gradveil.attacks.batch_statistics import BatchStatistics
from gradveil.attacks.deep_leakage import DLG, IDLG
from gradveil.attacks.ensembles import ENSEMBLES, Ensemble, informed_twins, line_up, resolve
from gradveil.attacks.feature_inversion import FeatureInversion
from gradveil.attacks.inverting_gradients import InvertingGradients
from gradveil.attacks.linear_layer import LinearLayer
from gradveil.attacks.matching import Recipe, run_recipe
from gradveil.attacks.peeling import Peeling
from gradveil.attacks.piste import PisteLike
from gradveil.attacks.referee import Referee, Verdict

__all__ = [
    "ATTACKS",
    "DLG",
    "ENSEMBLES",
    "IDLG",
    "Attack",
    "AttackCard",
    "BatchStatistics",
    "Desk",
    "Ensemble",
    "FeatureInversion",
    "InvertingGradients",
    "LinearLayer",
    "Peeling",
    "PisteLike",
    "Recipe",
    "Referee",
    "Verdict",
    "informed_twins",
    "launch",
    "line_up",
    "resolve",
    "run_recipe",
]
