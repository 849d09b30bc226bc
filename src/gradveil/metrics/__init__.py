"""How good a reconstruction is: one pure function per metric, one value per example; matching and summary apart.

    mse · psnr · ssim · lpips      registered in `METRICS`: (N, ...) and (N, ...) in, (N,) out
    identification · labels        is the original the nearest of many candidates; were the labels recovered
    matching                       which reconstruction belongs to which record of a batch
    summary                        medians, intervals and shares, in the form the results folder holds

A metric of the first row is one file and one line below.
"""

from __future__ import annotations

from gradveil.metrics.base import METRICS, Metric, MetricCard, Unavailable, measure
from gradveil.metrics.identification import MINIMUM_CANDIDATES, identified, ranks
from gradveil.metrics.labels import label_hits
from gradveil.metrics.lpips import lpips_alex, lpips_vgg
from gradveil.metrics.matching import assign
from gradveil.metrics.mse import mean_squared_error
from gradveil.metrics.psnr import PSNR_CAP, peak_signal_to_noise
from gradveil.metrics.ssim import structural_similarity
from gradveil.metrics.summary import bootstrap_median, summarise, wilson

__all__ = [
    "METRICS",
    "MINIMUM_CANDIDATES",
    "PSNR_CAP",
    "Metric",
    "MetricCard",
    "Unavailable",
    "assign",
    "bootstrap_median",
    "identified",
    "label_hits",
    "lpips_alex",
    "lpips_vgg",
    "mean_squared_error",
    "measure",
    "peak_signal_to_noise",
    "ranks",
    "structural_similarity",
    "summarise",
    "wilson",
]
