"""How good a reconstruction is: one pure function per metric, one value per example; matching and summary apart.

    mse · psnr · ssim · lpips      registered in `METRICS`: (N, ...) and (N, ...) in, (N,) out
    noise_fraction · relative_leakage   the same, judging the reconstruction alone, and beside a prior image
    regions                        all of these inside a target region
    duplicates                     which candidates are copies of one record
    identification · labels        is the original among the nearest of many candidates; were the labels recovered
    matching                       which reconstruction belongs to which record of a batch
    summary                        medians, intervals and shares, in the form the results folder holds

A metric of the first row is one file and one line below.
"""

from __future__ import annotations

from gradveil.metrics.base import METRICS, Metric, MetricCard, Unavailable, measure
from gradveil.metrics.duplicates import duplicate_groups
from gradveil.metrics.identification import MINIMUM_CANDIDATES, among_nearest, identified, owner_hits, ranks
from gradveil.metrics.labels import label_hits
from gradveil.metrics.lpips import lpips_alex, lpips_vgg
from gradveil.metrics.matching import assign
from gradveil.metrics.mse import mean_squared_error
from gradveil.metrics.noise_fraction import predicted_noise, predicted_noise_by
from gradveil.metrics.psnr import PSNR_CAP, peak_signal_to_noise
from gradveil.metrics.regions import bounding_boxes, measure_region
from gradveil.metrics.relative_leakage import relative_leakage, relative_leakage_nvflare
from gradveil.metrics.ssim import structural_similarity
from gradveil.metrics.summary import bootstrap_median, median, share_of, summarise, wilson
from gradveil.significance import SignedRank, daggers, signed_rank

__all__ = [
    "METRICS",
    "MINIMUM_CANDIDATES",
    "PSNR_CAP",
    "Metric",
    "MetricCard",
    "SignedRank",
    "Unavailable",
    "among_nearest",
    "assign",
    "bootstrap_median",
    "bounding_boxes",
    "daggers",
    "duplicate_groups",
    "identified",
    "label_hits",
    "lpips_alex",
    "lpips_vgg",
    "mean_squared_error",
    "measure",
    "measure_region",
    "median",
    "owner_hits",
    "peak_signal_to_noise",
    "predicted_noise",
    "predicted_noise_by",
    "ranks",
    "relative_leakage",
    "relative_leakage_nvflare",
    "share_of",
    "signed_rank",
    "structural_similarity",
    "summarise",
    "wilson",
]
