"""How much could any attacker get, without running one."""

from gradveil.risk.accountant import epsilon, gaussian_epsilon, noise_for
from gradveil.risk.bounds import advantage_bound, gaussian_bound, mixed_bound, no_prior_success, sampled_bound
from gradveil.risk.certificates import Certificate, certificate_from, certificate_of
from gradveil.risk.guarantees import Guarantee, privacy_of
from gradveil.risk.mean_error import mean_error_bound, mean_error_from_spectra
from gradveil.risk.releases import privacy_of_training, privacy_of_updates

__all__ = [
    "Certificate",
    "Guarantee",
    "advantage_bound",
    "certificate_from",
    "certificate_of",
    "epsilon",
    "gaussian_bound",
    "gaussian_epsilon",
    "mean_error_bound",
    "mean_error_from_spectra",
    "mixed_bound",
    "no_prior_success",
    "noise_for",
    "privacy_of",
    "privacy_of_training",
    "privacy_of_updates",
    "sampled_bound",
]
