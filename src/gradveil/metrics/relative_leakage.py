"""Relative data leakage value (RDLV): how much more a reconstruction resembles the record than a prior image does."""

from __future__ import annotations

from torch import Tensor

from gradveil.errors import UsageError
from gradveil.metrics.base import METRICS, MetricCard
from gradveil.metrics.ssim import structural_similarity

__all__ = ["SMALLEST_SIMILARITY", "relative_leakage", "relative_leakage_nvflare"]

SMALLEST_SIMILARITY = 0.01
"""Similarities to the prior below this are raised to it before dividing: SSIM may be zero or negative."""

PAPER = "Hatamizadeh et al., Do Gradient Inversion Attacks Make Federated Learning Unsafe?, 2023"
URL = "https://arxiv.org/abs/2202.06924"


@METRICS.register(
    MetricCard(
        name="rdlv",
        summary="SSIM to the original relative to the reconstruction's SSIM to a prior image, minus one: the paper's form.",
        paper=PAPER,
        url=URL,
        cost="Two SSIMs per image.",
        weakness=(
            "The reconstruction stands in the denominator too: noise resembles the prior less and less, so a worse one can score "
            "higher. Read rdlv_nvflare."
        ),
        higher_is_better=True,
        perfect=None,
        needs=("prior",),
        ordered=False,
    )
)
def relative_leakage(reconstructed: Tensor, original: Tensor, *, prior: Tensor) -> Tensor:
    r"""Return :math:`(\mathrm{SSIM}(x, x_s) - \mathrm{SSIM}(x_s, P)) / \mathrm{SSIM}(x_s, P)`, equation 19 of the shadow paper.

    Args:
        reconstructed: (N, C, ...) in [0, 1], :math:`x_s`.
        original: Same shape, :math:`x`.
        prior: (C, ...) one image anyone could guess, :math:`P`; papers take the mean of the data.

    Returns:
        (N,) in double precision; below 0, the reconstruction resembles the prior more than the record.
    """
    found = structural_similarity(reconstructed, original)
    return _relative(found, _to_prior(reconstructed, prior))


@METRICS.register(
    MetricCard(
        name="rdlv_nvflare",
        summary="SSIM of the reconstruction to the original relative to that of a prior image, minus one: NVFlare's form.",
        paper=PAPER,
        url=URL,
        cost="Two SSIMs per image.",
        weakness="Divides by how typical the record is: records unlike the prior score high for little.",
        higher_is_better=True,
        perfect=None,
        needs=("prior",),
    )
)
def relative_leakage_nvflare(reconstructed: Tensor, original: Tensor, *, prior: Tensor) -> Tensor:
    r"""Return :math:`(\mathrm{SSIM}(x, x_s) - \mathrm{SSIM}(x, P)) / \mathrm{SSIM}(x, P)`, the form of released code.

    See `relative_leakage` for the arguments. Below 0, the prior resembles the record more than the reconstruction does. The
    denominator does not depend on the reconstruction, so a better one always scores higher.
    """
    found = structural_similarity(reconstructed, original)
    return _relative(found, _to_prior(original, prior))


def _to_prior(images: Tensor, prior: Tensor) -> Tensor:
    if prior.shape != images.shape[1:]:
        raise UsageError(
            f"the prior has shape {tuple(prior.shape)} and images have {tuple(images.shape[1:])}; give one like them"
        )
    # In double precision: the prior must not be rounded to that of half-precision pictures.
    wide = images.double()
    return structural_similarity(wide, prior.to(wide).expand_as(wide))


def _relative(similarity: Tensor, to_prior: Tensor) -> Tensor:
    base = to_prior.clamp_min(SMALLEST_SIMILARITY)
    return (similarity - base) / base
