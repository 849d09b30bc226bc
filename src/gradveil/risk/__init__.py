"""How much could any attacker get, without running one."""

from gradveil.risk.accountant import epsilon, gaussian_epsilon, noise_for
from gradveil.risk.guarantees import Guarantee, privacy_of

__all__ = ["Guarantee", "epsilon", "gaussian_epsilon", "noise_for", "privacy_of"]
