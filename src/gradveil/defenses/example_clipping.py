"""Clipping of every single example's gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor
from torch.func import vmap

from gradveil.adversary import OpenAdversary
from gradveil.defenses.base import DEFENSES, ClientView, Defense, DefenseCard, State
from gradveil.defenses.clipping import SCOPES, Scope, clip
from gradveil.learning.learner import GradientHook, Learner
from gradveil.study.checks import check_choice, check_number
from gradveil.tensors import Named

__all__ = ["ClippedExamplesAdversary", "ExampleClipping", "clip_each"]


@dataclass(frozen=True)
class ClippedExamplesAdversary(OpenAdversary):
    """Clips the gradient of every dummy in the same way.

    Every example's own gradient arrives up to one positive factor, the same for weight and bias of a layer; so the ratios that
    analytic attacks use are still those of the data, and all tensors count as exact.
    """

    bound: float
    scope: Scope

    def on_examples(self, learner: Learner, variables: Named) -> GradientHook:
        """Clip along the leading axis, differentiably."""

        def hook(step: int, weights: Named, gradient: Named, inputs: Tensor, targets: Tensor) -> Named:
            return clip_each(gradient, self.bound, self.scope)

        return hook


def clip_each(gradients: Named, bound: float, scope: Scope) -> Named:
    """Clip each gradient along the leading axis by itself; differentiable and safe under vmap."""
    return vmap(lambda gradient: clip(gradient, bound, scope))(gradients)


@DEFENSES.register(
    DefenseCard(
        name="example_clipping",
        summary="Scales the gradient of every single example down to a given norm before they are averaged.",
        paper="Abadi et al., Deep Learning with Differential Privacy, CCS 2016",
        url="https://arxiv.org/abs/1607.00133",
        cost="one gradient per example: memory grows with the batch, and time several-fold; models that mix examples "
        "(BatchNorm in train mode) cannot use it",
        weakness="with one example it only changes the update's length; with several it only reweighs them",
        acts_on=("gradient",),
        ladder=({"bound": 4.0}, {"bound": 1.0}, {"bound": 0.25}, {"bound": 0.05}),
        off={"bound": None},
    )
)
@dataclass(frozen=True, kw_only=True)
class ExampleClipping(Defense):
    """Per-example clipping: ``g = mean_i g_i · min(1, bound / ‖g_i‖₂)`` at every local step.

    With ``scope = "layer"`` the norm is taken within each layer (Fed-CDP, Wei et al. 2021, https://arxiv.org/abs/2107.01154).

    Departs from the paper: no noise and no Poisson sampling here; chain a noise after it, which then acts on the mean. The mean
    is over the examples present, not over an expected batch size.

    Cost: per-example gradients. Known weakness: no protection by itself; it limits what noise must cover.

    Attributes:
        bound: Largest norm of one example's gradient; None is off.
        scope: ``global`` clips all weights together, ``layer`` each layer by itself.
    """

    granularity: ClassVar[Literal["batch", "example"]] = "example"

    bound: float | None = 1.0
    scope: Scope = "global"

    def __post_init__(self) -> None:
        """Refuse a bound that nothing fits in, and unknown scopes."""
        if self.bound is not None:
            check_number("example_clipping", "bound", self.bound, open_below=True)
        check_choice("example_clipping", "scope", self.scope, SCOPES)

    def protect_gradient(self, gradient: Named, view: ClientView, state: State) -> tuple[Named, State]:
        """Clip each example's gradient; the client averages them afterwards."""
        return gradient if self.bound is None else clip_each(gradient, self.bound, self.scope), state

    def adversary(self) -> OpenAdversary:
        """Return the attacker who clips too."""
        return OpenAdversary() if self.bound is None else ClippedExamplesAdversary(self.bound, self.scope)
