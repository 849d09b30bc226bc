"""How much could any attacker get, without running one."""

from gradveil.risk.calibration import Calibration, built_in_calibration, calibrate, read_alpha
from gradveil.risk.certificates import Certificate, certificate_from, certificate_of
from gradveil.risk.exposure import Assessment, DefendedRelease, RecordRisk, assess, defended_release
from gradveil.risk.fisher import diagonal_leakage, fisher_leakage
from gradveil.risk.invloss import MEANING, InvLoss, inversion_loss
from gradveil.risk.invre import RiskScore, rank_weights, risk_score
from gradveil.risk.linear_bayes import posterior_error
from gradveil.risk.listed import named_first
from gradveil.risk.mean_error import MeanErrorBound, mean_error_bound, mean_error_from_spectra, smoothed_score
from gradveil.risk.oracle import expose
from gradveil.risk.prior import Prior, public_prior

__all__ = [
    "MEANING",
    "Assessment",
    "Calibration",
    "Certificate",
    "DefendedRelease",
    "InvLoss",
    "MeanErrorBound",
    "Prior",
    "RecordRisk",
    "RiskScore",
    "assess",
    "built_in_calibration",
    "calibrate",
    "certificate_from",
    "certificate_of",
    "defended_release",
    "diagonal_leakage",
    "expose",
    "fisher_leakage",
    "inversion_loss",
    "mean_error_bound",
    "mean_error_from_spectra",
    "named_first",
    "posterior_error",
    "public_prior",
    "rank_weights",
    "read_alpha",
    "risk_score",
    "smoothed_score",
]
