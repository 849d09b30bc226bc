"""Refiner: train on robust data whose gradient is useful and whose pictures are noise."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from gradveil.adversary import OpenAdversary, prefixed, with_prefix
from gradveil.defenses.base import DEFENSES, MEASURED, ClientView, Defense, DefenseCard, Need, State
from gradveil.defenses.refiner.adversary import DeblendingAdversary, MixtureAdversary
from gradveil.defenses.refiner.refinement import Optimiser, Refinement, Scope, Terms, project_on_ball
from gradveil.errors import DefenseOrder, ReplaceLayer, UsageError
from gradveil.models.batch_norm import batch_norm_layers
from gradveil.records import Batch
from gradveil.study.checks import check_choice, check_flag, check_number, check_whole
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named, check_finite

__all__ = ["LAMBDA", "Refiner", "evaluation_network"]

LAMBDA = MEASURED + "lambda"
CENTRE = "refiner_centre/"
INPUTS = "refiner_inputs"

TOGETHER = 128
"""Examples refined together, where a client trains on more at once: the paper's batch."""

AT_ONCE = 2**26
"""Entries of single examples' gradients held at one time: a quarter of a gigabyte in float32, and a few times that in use."""


def evaluation_network(name: str, like: Tensor) -> nn.Module:
    """Return the evaluation network in the precision and on the device of ``like``: frozen, in eval mode, shared by callers."""
    # Later: most defenses need no networks.
    from gradveil.networks.cards import find_card

    card = find_card(name)
    return _network(str(card), card.stat().st_mtime_ns, like.device, like.dtype)


@functools.lru_cache(maxsize=8)
def _network(card: str, changed: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    from gradveil.networks.evaluation import EvaluationNetwork
    from gradveil.networks.store import load_network

    network = load_network(card).to(device=device, dtype=dtype)
    if not isinstance(network, EvaluationNetwork):
        raise UsageError(f"refiner: {card!r} holds a {type(network).__name__}; it needs an evaluation network")
    if device.type == "cpu":
        for parameter in network.parameters():
            if parameter.ndim == 4:  # this order of kernels is a fifth faster there, with the same numbers but for rounding
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return network.eval().requires_grad_(False)


@DEFENSES.register(
    DefenseCard(
        name="refiner",
        summary="Trains on robust data: noisy pictures, refined until their gradient is close to that of the real ones.",
        paper="Fan et al., Refiner: Data Refining against Gradient Leakage Attacks in Federated Learning, USENIX Security 2025",
        url="https://arxiv.org/abs/2212.02042",
        cost="10 double-backward steps, about 32 undefended ones, and 10 passes through a network of 39 million multiplications "
        "per picture; accuracy falls with the blend",
        weakness="the robust picture still holds a share 1 - blend of the real one, which an attacker learns to filter out on "
        "public pictures; with a small epsilon mostly the raw gradient is sent, which lambda tells",
        acts_on=("data", "gradient"),
        ladder=({"blend": 0.1}, {"blend": 0.3}, {"blend": 0.5}, {"blend": 0.7}, {"blend": 0.9}),
        off={"blend": 0.0, "steps": 0},
        random=True,
        reconstruction_of_paper=True,
    )
)
@dataclass(frozen=True, kw_only=True)
class Refiner(Defense):
    """Refiner: send the gradient of ``x* = argmin UM(x*, x) - β PM(x*)`` instead of that of x.

    UM = Σ_i ‖w_i (g_i(x*) - g_i(x))‖² with w_i = |g_i θ_i τ^i| entry by entry, i the layer from 1 (weight and bias share it), a
    constant in the descent. PM = D(x*), the noise fraction that the evaluation network sees, mean over examples; D is frozen. The
    start is ``(1 - α) x + α v``, v ~ U(0, 1); then ι steps, each clamped to [0, 1]. Labels stay the true ones. With ``epsilon``
    the client sends the point nearest to g(x*) in the ball of that radius around g(x): ``g_up = (1 - λ) g(x) + λ g(x*)`` with
    ``λ = min(1, ε / ‖g(x*) - g(x)‖)``. **A small ε sends mostly the raw gradient.** λ is kept in the state as
    ``measured_lambda``; trainings and audits show it (0: the raw gradient is sent; 1: the ball has no effect).

    Departs from the paper: it has no released code and its Appendix C (the projection) is empty, so the following are readings.
    Eq. 4 prints the norm of a sum over layers of different shapes; we sum squared norms. UM is many orders smaller than PM, so β
    would mean nothing: ``terms = "relative"`` divides UM by its value at the start, so that both begin near one; ``"log"`` takes
    logarithms of both; ``"raw"`` is Eq. 2 as printed. Optimiser and step size are not stated: Adam, with a step that moves
    pictures about as far as Appendix F reports. The ball is Euclidean, around all tensors together or each layer, absolute or
    in norms of g. ``match = "batch"`` keeps the mean gradient of the batch, which is what the client would have sent;
    ``"example"`` that of every example by itself. The paper takes one local step; here x* is made once per round at the global
    weights, in groups of one minibatch (at most 128 examples), and the ball is applied in every step, around the gradient of
    the raw minibatch at the local weights; λ is then the mean over steps and balls. The default sends g(x*), ε = None: the
    paper varies ε, and fixes 0.1 in ablations, in units that depend on the model.

    Cost: ι double-backward steps through the model, ι passes to and fro through D, and one gradient of the raw data; nothing on
    the wire. Known weakness: x* keeps most of (1 - α) x; see `DeblendingAdversary` and, where the ball is used,
    `MixtureAdversary`. D sees noise, not meaning. In a chain, nothing before may change the gradient where the ball is used: it
    would be pulled back.

    Attributes:
        blend: α, the share of noise in the start.
        balance: β, the weight of the privacy metric; 0 needs no evaluation network.
        steps: ι, refinement steps.
        decay: τ, weight of a layer over that before.
        epsilon: Radius of the ball, or None to send the gradient of the robust data as it is.
        scope: ``global``, one ball; ``layer``, one for each layer.
        relative: Whether epsilon counts in norms of the raw gradient.
        match: ``batch`` or ``example``: whose gradient is kept.
        terms: ``relative``, ``log`` or ``raw``: the scale of the two metrics.
        optimiser: ``adam`` or ``gradient``, plain descent.
        rate: Step size.
        network: Name or path of the evaluation network.
    """

    blend: float = 0.5
    balance: float = 1.0
    steps: int = 10
    decay: float = 0.95
    epsilon: float | None = None
    scope: Scope = "global"
    relative: bool = False
    match: Literal["batch", "example"] = "batch"
    terms: Terms = "relative"
    optimiser: Optimiser = "adam"
    rate: float = 0.05
    network: str = "evaluation-32"

    def __post_init__(self) -> None:
        """Refuse settings without a meaning."""
        check_number("refiner", "blend", self.blend, below=1.0)
        for name in ("balance", "rate"):
            check_number("refiner", name, getattr(self, name))
        check_number("refiner", "decay", self.decay, below=1.0 + 1e-12)
        check_whole("refiner", "steps", self.steps, 0)
        if self.epsilon is not None:
            check_number("refiner", "epsilon", self.epsilon)
        check_flag("refiner", "relative", self.relative)
        check_choice("refiner", "scope", self.scope, ("global", "layer"))
        check_choice("refiner", "match", self.match, ("batch", "example"))
        check_choice("refiner", "terms", self.terms, ("relative", "log", "raw"))
        check_choice("refiner", "optimiser", self.optimiser, ("adam", "gradient"))

    @property
    def random(self) -> bool:
        """Noise is drawn where there is some to blend in."""
        return self.blend > 0

    def protect_batch(self, batch: Batch, view: ClientView, state: State) -> tuple[Batch, State]:
        """Make the robust data, and keep what the ball will be around."""
        inputs = batch.inputs
        check_finite({"inputs": inputs}, "the batch")
        kept = _without_secrets(state)
        if self._idle or len(batch) == 0:
            return batch, kept
        refinement = self._refinement(view, inputs)
        drawn = torch.rand(inputs.shape, generator=view.generator("refiner"), device=inputs.device, dtype=inputs.dtype)
        start = (1 - self.blend) * inputs + self.blend * drawn
        refine = refinement.jointly if self.match == "batch" else refinement.singly
        used = _rows_used(view.learner.settings, len(batch))
        robust, centre = [], None
        for rows in self._groups(view, used):
            noise = view.learner.noise_at(0, list(rows))
            part, raw = refine(inputs[rows.start : rows.stop], start[rows.start : rows.stop], batch.targets[list(rows)], noise)
            robust.append(part)
            share = len(rows) / used
            centre = {n: v * share if centre is None else centre[n] + v * share for n, v in raw.items()}
        kept[LAMBDA] = torch.ones((), dtype=torch.float64)
        if self.epsilon is not None and centre is not None:
            # The gradient of a single step is at hand already; later steps have other weights, and need the inputs.
            once = view.learner.settings.steps(len(batch)) == 1
            kept |= with_prefix(centre, CENTRE) if once else {INPUTS: inputs}
        return batch.replace(inputs=torch.cat([*robust, start[used:]])), kept

    def protect_gradient(self, gradient: Named, view: ClientView, state: State) -> tuple[Named, State]:
        """Pull the gradient of the robust data into the ball around that of the raw data."""
        check_finite(gradient)
        if self.epsilon is None or (INPUTS not in state and not prefixed(state, CENTRE)):
            return gradient, state
        self._check_unchanged(gradient, view)
        centre, last = self._centre(view, state)
        projected, shares = project_on_ball(gradient, centre, self.epsilon, self.scope, self.relative)
        before = float(state[LAMBDA]) * view.step  # a mean over the steps so far
        told = torch.tensor((before + float(shares.mean())) / (view.step + 1), dtype=torch.float64)
        return projected, {**(_without_secrets(state) if last else state), LAMBDA: told}

    def needs(self) -> frozenset[Need]:
        """Ask for the loss: robust data must train the model as the raw data do."""
        return super().needs() | ({"loss"} if not self._idle else set())

    def adversary(self) -> OpenAdversary:
        """Return the attacker who restores robust data or, where the ball is used, fits raw and robust data together."""
        if self._idle:
            return OpenAdversary()
        if self.epsilon is None:
            return DeblendingAdversary(self.blend, self)
        return MixtureAdversary(self.blend, self.epsilon, self.scope, self.relative, defense=self)

    @property
    def _idle(self) -> bool:
        return self.blend == 0 and self.steps == 0

    def _refinement(self, view: ClientView, inputs: Tensor) -> Refinement:
        """Gather what the descent needs, and refuse what it cannot work on."""
        judged = self.balance > 0 and self.steps > 0
        if judged and (inputs.ndim != 4 or inputs.shape[1] not in (1, 3)):
            raise UsageError(
                "refiner's evaluation network judges pictures with 1 or 3 channels, not inputs of shape "
                f"{tuple(inputs.shape[1:])}; set balance = 0 to refine without it, or use data_noise"
            )
        layers = batch_norm_layers(view.learner.model).items()
        mixing = [name for name, layer in layers if getattr(layer, "running_mean", None) is None]
        if self.match == "example" and mixing:
            raise ReplaceLayer(
                f"{mixing[0]!r} is BatchNorm on the statistics of the batch, so single examples have no gradient of their own; "
                "set match = 'batch', or batch_norm = 'eval'"
            )
        return Refinement(
            learner=view.learner,
            network=evaluation_network(self.network, inputs) if judged else None,
            balance=self.balance,
            steps=self.steps,
            decay=self.decay,
            rate=self.rate,
            terms=self.terms,
            optimiser=self.optimiser,
        )

    def _groups(self, view: ClientView, count: int) -> list[range]:
        """Return the rows refined together: a minibatch, and no more than fit."""
        size = min(view.learner.settings.minibatch or count, TOGETHER)
        if self.match == "example":
            size = max(1, min(size, AT_ONCE // max(1, view.learner.parameters)))
        return [range(begin, min(begin + size, count)) for begin in range(0, count, size)]

    def _centre(self, view: ClientView, state: State) -> tuple[Named, bool]:
        """Return the gradient of the raw data at this step, and whether this is the last step."""
        if INPUTS not in state:
            return prefixed(state, CENTRE), True
        inputs, settings = state[INPUTS], view.learner.settings
        assert view.batch is not None  # the client shows every step's batch
        chosen = view.learner.rows_at(view.step, len(inputs))
        own = inputs if chosen is None else inputs[chosen]
        noise = view.learner.noise_at(view.step, chosen)
        centre = view.learner.gradient(view.weights, own, view.batch.targets, noise)
        return centre, view.step + 1 >= settings.steps(len(inputs))

    def _check_unchanged(self, gradient: Named, view: ClientView) -> None:
        """Refuse to pull a gradient back to the raw one after another defense protected it."""
        own = view.raw_gradient
        if own is None or own is gradient or all(torch.equal(value, own[name]) for name, value in gradient.items()):
            return
        raise DefenseOrder(
            "refiner with epsilon pulls the gradient back towards the raw one, so nothing before it in a chain may change the "
            "gradient; put refiner first, or leave epsilon out"
        )


def _rows_used(settings: TrainingSettings, count: int) -> int:
    """Return how many records, from the first, local training takes; the others need no refinement."""
    if settings.epochs or not settings.minibatch:
        return count
    return min(count, settings.local_steps * settings.minibatch)


def _without_secrets(state: State) -> State:
    """Return the state without the raw gradient and inputs, which must not outlive a round."""
    return {name: value for name, value in state.items() if name != INPUTS and not name.startswith(CENTRE)}
