"""Which defenses the published tables compare, as their papers set them, and what the papers measured."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ROWS", "Row", "rows"]


@dataclass(frozen=True)
class Row:
    """One defense of a table.

    Attributes:
        title: As the SVDefense paper calls it, or ours.
        spelling: As `gradveil.defenses.build_defense` reads it.
        main: Whether it is one of the main rows of that paper.
        published: PSNR, SSIM and LPIPS of Table III (CIFAR-10, ResNet-18, its adaptive attacker), where there is one.
        published_mnist: PSNR of Table I (MNIST): its plain attacker and its adaptive one.
        ablation: Whether it is SVDefense with a part switched off; run only where asked for.
    """

    title: str
    spelling: str
    main: bool = False
    published: tuple[float, float, float] | None = None
    published_mnist: tuple[float, float] | None = None
    ablation: bool = False


ROWS = (
    Row("none", "none", True, (23.88, 0.841, 0.189)),
    Row("DP-Gau", "gaussian_noise(std=0.03)", True, (12.83, 0.248, 0.583)),
    Row("DP-Lap", "laplace_noise(scale=0.03)", True, (13.11, 0.272, 0.575)),
    Row("Outpost", "outpost", True, (18.04, 0.378, 0.635)),
    Row("CENSOR", "censor", True, (19.27, 0.691, 0.275), (8.19, 16.41)),
    Row("PRECODE", "precode", True, (float("inf"), 1.0, 0.000), (3.57, 57.42)),
    Row("Prune", "pruning(rate=0.9)", True, (19.35, 0.692, 0.322), (12.93, 36.13)),
    Row("Soteria", "soteria(rate=0.8)", True, (24.10, 0.847, 0.178), (10.81, 38.74)),
    Row("DGP", "dgp", True, (21.15, 0.758, 0.263), (9.73, 35.64)),
    Row("pFGD", "pfgd(rate=0.01)", True, (12.93, 0.212, 0.582)),
    Row("SVDefense", "svdefense", True, (12.53, 0.138, 0.587)),
    Row("SVDefense, hardened", "svdefense(hardened=True, least_error=1.0)"),
    Row("clipping", "clipping(bound=1)"),
    Row("top-k", "top_k(keep=0.1)"),
    Row("entry dropout", "entry_dropout(rate=0.9)"),
    Row("data noise", "data_noise(std=0.1)"),
    Row("GQ, 4 bits", "quantisation(mode='uniform', bits=4)"),
    Row("QSGD, 4 bits", "quantisation(mode='qsgd', bits=4)"),
    Row("sign", "quantisation(mode='sign')"),
    Row("GradDefense", "graddefense"),
    Row("DP-SGD", "dp_sgd"),
    Row("NVFlare percentile noise", "percentile_noise"),
    Row("LRP (reconstructed)", "lrp"),
    Row("MQ (reconstructed)", "mq"),
    Row("SVDefense, fixed threshold 0.8 (no S)", "svdefense(adaptive=False)", ablation=True),
    Row("SVDefense, channels alike (no C)", "svdefense(weights='none')", ablation=True),
    Row("SVDefense, averaged by examples (no L)", "svdefense(layer_wise=False)", ablation=True),
)


def rows(only: str = "") -> list[Row]:
    """Return all but ablations, only ``main`` ones, only ``ablation`` ones, or those named, separated by semicolons."""
    if only == "main":
        return [row for row in ROWS if row.main]
    if only == "ablation":
        return [row for row in ROWS if row.ablation]
    wanted = {part.strip() for part in only.split(";") if part.strip()}
    return [row for row in ROWS if (row.title in wanted if wanted else not row.ablation)]
