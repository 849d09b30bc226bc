"""Inverting gradients: cosine matching with total variation (Geiping et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradveil.attacks.base import ATTACKS, AttackCard
from gradveil.attacks.engine.matching import Labels, Start
from gradveil.attacks.engine.optimisers import Schedule
from gradveil.attacks.gradient_matching import GradientMatching
from gradveil.records import Knowledge

__all__ = ["InvertingGradients"]


@ATTACKS.register(
    AttackCard(
        name="inverting_gradients",
        summary="Searches for inputs whose update points in the same direction, keeping them smooth.",
        paper="Geiping et al., Inverting Gradients - How easy is it to break privacy in federated learning?, NeurIPS 2020",
        url="https://arxiv.org/abs/2003.14053",
        cost="one double backward pass per step and candidate; thousands of steps",
        weakness="ReLU networks give its loss almost no direction; set smooth_relu",
        needs=frozenset({Knowledge.ARCHITECTURE, Knowledge.EXAMPLES}),
        home="sigmoid LeNet, default initialisation, one 3×16×16 picture, 200 steps",
        floor_psnr=17.0,
    )
)
@dataclass(frozen=True, kw_only=True)
class InvertingGradients(GradientMatching):
    """Minimise ``1 - <g(x'), g> / (|g(x')| |g|) + tv TV(x')`` by Adam on the inputs.

    The cosine is global: one inner product over all tensors; ``objective="layer_cosine"`` takes the mean over tensors instead.
    Updates after several local steps are matched by replaying the steps.

    Departs from the paper: inputs live in [0, 1] rather than in normalised units, so the start is N(0.5, 0.25²); the best
    iterate is kept, not the last; the cosine is computed so that float32 can tell small angles apart; ``signed=True`` with the
    step schedule is the published optimiser, and the default here, while our ensembles use the unsigned one, which is stronger
    on smooth networks. ``smooth_relu``, ``tv_end`` and ``relative`` are ours.

    Cost: about nine forward passes per step and candidate. Known weakness: many local minima; no single setting wins
        everywhere, so ensembles run several.
    """

    card: ClassVar[AttackCard]
    steps: int = 4000
    restarts: int = 1
    learning_rate: float = 0.1
    signed: bool = True
    schedule: Schedule = "steps"
    tv: float = 1e-4
    tv_end: float | None = None
    relative: bool = False
    objective: str = "cosine"
    start: Start = "noise"
    labels: Labels = "recovered"
    smooth_relu: bool = False
    stance: str = "plain"
    title: str = ""
