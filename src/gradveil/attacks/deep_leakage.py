"""Deep leakage from gradients and its improvement: L-BFGS on the squared difference (Zhu et al. 2019, Zhao et al. 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from gradveil.attacks.base import ATTACKS, AttackCard
from gradveil.attacks.engine.optimisers import LBFGS, Adam
from gradveil.attacks.gradient_matching import GradientMatching
from gradveil.records import Knowledge

__all__ = ["DLG", "IDLG"]

_HOME = "sigmoid LeNet, default initialisation, one 3×16×16 picture, 200 steps"


@dataclass(frozen=True, kw_only=True)
class _Quadratic(GradientMatching):
    """What DLG and iDLG share; not an attack by itself."""

    card: ClassVar[AttackCard]
    optimiser: ClassVar[type[Adam] | type[LBFGS]] = LBFGS
    steps: int = 300
    restarts: int = 1
    history: int = 20
    objective: str = "l2"
    stance: str = "plain"


@ATTACKS.register(
    AttackCard(
        name="dlg",
        summary="Searches for inputs and labels whose gradient equals the one seen, by L-BFGS.",
        paper="Zhu, Liu and Han, Deep Leakage from Gradients, NeurIPS 2019",
        url="https://arxiv.org/abs/1906.08935",
        cost="one double backward pass per step and candidate; hundreds of steps",
        weakness="needs twice differentiable activations; joint labels make it fragile for batches",
        needs=frozenset({Knowledge.ARCHITECTURE, Knowledge.EXAMPLES}),
        home=_HOME,
        floor_psnr=40.0,
    )
)
@dataclass(frozen=True, kw_only=True)
class DLG(_Quadratic):
    """Minimise ``sum_l |g_l(x', softmax(y')) - g_l|^2`` over inputs x' and label logits y'.

    Departs from the paper: L-BFGS is batched with an Armijo line search, so a diverging candidate halves its step instead of
    exploding; inputs start at N(0.5, 0.25²) because ours live in [0, 1]; the best iterate is kept.

    Cost: 300 steps. Known weakness: ReLU networks have no second derivative to follow; noise of any size ends it.
    """

    fixed: ClassVar[Mapping[str, Any]] = {"start": "noise", "box": False, "labels": "joint"}


@ATTACKS.register(
    AttackCard(
        name="idlg",
        summary="Reads the label off the last layer, then searches for the input by L-BFGS.",
        paper="Zhao, Mopuri and Bilen, iDLG: Improved Deep Leakage from Gradients, 2020",
        url="https://arxiv.org/abs/2001.02610",
        cost="one double backward pass per step and candidate; hundreds of steps",
        weakness="needs twice differentiable activations and a readable last layer",
        needs=frozenset({Knowledge.ARCHITECTURE, Knowledge.EXAMPLES}),
        home=_HOME,
        floor_psnr=42.0,
    )
)
@dataclass(frozen=True, kw_only=True)
class IDLG(_Quadratic):
    """Recover the label by the sign of the classifier's bias gradient, then minimise ``sum_l |g_l(x', y) - g_l|^2`` over x'.

    Departs from the paper: as DLG; for batches, labels come from bias counts (see `gradveil.attacks.engine.labels`).

    Cost: 300 steps. Known weakness: as DLG, and a wrong label cannot be mended.
    """

    fixed: ClassVar[Mapping[str, Any]] = {"start": "noise", "box": False, "labels": "recovered"}
