"""How much could any attacker get, without running one."""

from gradveil.risk.accountant import epsilon, gaussian_epsilon, noise_for
from gradveil.risk.guarantees import Guarantee, privacy_of
from gradveil.risk.releases import privacy_of_training, privacy_of_updates

__all__ = [
    "Guarantee",
    "epsilon",
    "gaussian_epsilon",
    "noise_for",
    "privacy_of",
    "privacy_of_training",
    "privacy_of_updates",
]
