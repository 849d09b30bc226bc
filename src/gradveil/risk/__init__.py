"""How much could any attacker get, without running one."""

from gradveil.risk.accountant import epsilon, gaussian_epsilon, noise_for
from gradveil.risk.bounds import advantage_bound, gaussian_bound, mixed_bound, no_prior_success, sampled_bound
from gradveil.risk.calibration import Calibration, built_in_calibration, calibrate, read_alpha
from gradveil.risk.certificates import Certificate, certificate_from, certificate_of
from gradveil.risk.exposure import Assessment, DefendedRelease, RecordRisk, assess, defended_release
from gradveil.risk.fisher import diagonal_leakage, fisher_leakage
from gradveil.risk.guarantees import Guarantee, privacy_of
from gradveil.risk.invloss import MEANING, InvLoss, inversion_loss, pruning_lower_bound
from gradveil.risk.invre import RiskScore, band_of, rank_weights, risk_score
from gradveil.risk.jacobians import Jacobian, gradient_jacobian, gradient_jacobians, jacobian_of
from gradveil.risk.mean_error import MeanErrorBound, mean_error_bound, mean_error_from_spectra, smoothed_score
from gradveil.risk.releases import privacy_of_training, privacy_of_updates
from gradveil.risk.spectra import Spectrum, choose_mode, left_vectors, spectra_of, spectrum

__all__ = [
    "MEANING",
    "Assessment",
    "Calibration",
    "Certificate",
    "DefendedRelease",
    "Guarantee",
    "InvLoss",
    "Jacobian",
    "MeanErrorBound",
    "RecordRisk",
    "RiskScore",
    "Spectrum",
    "advantage_bound",
    "assess",
    "band_of",
    "built_in_calibration",
    "calibrate",
    "certificate_from",
    "certificate_of",
    "choose_mode",
    "defended_release",
    "diagonal_leakage",
    "epsilon",
    "fisher_leakage",
    "gaussian_bound",
    "gaussian_epsilon",
    "gradient_jacobian",
    "gradient_jacobians",
    "inversion_loss",
    "jacobian_of",
    "left_vectors",
    "mean_error_bound",
    "mean_error_from_spectra",
    "mixed_bound",
    "no_prior_success",
    "noise_for",
    "privacy_of",
    "privacy_of_training",
    "privacy_of_updates",
    "pruning_lower_bound",
    "rank_weights",
    "read_alpha",
    "risk_score",
    "sampled_bound",
    "smoothed_score",
    "spectra_of",
    "spectrum",
]
