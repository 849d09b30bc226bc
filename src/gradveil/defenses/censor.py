"""CENSOR: send a random direction orthogonal to the gradient, chosen by its loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.func import vmap

from gradveil.adversary import OBSERVED, OpenAdversary, prefixed, with_prefix
from gradveil.defenses.base import DEFENSES, ClientView, Defense, DefenseCard, Need, State
from gradveil.records import Batch, Comparison, Observation, Update, WhatArrives
from gradveil.study.checks import check_choice, check_number
from gradveil.tensors import Named, check_finite, flatten, unflatten

__all__ = ["Censor", "CensorAdversary", "Selection", "fallback_rate", "orthogonal_directions", "select_candidate"]

Scope = Literal["layer", "whole"]
Sampling = Literal["normal", "public"]

ROUNDS = "censor_rounds"
FALLBACKS = "censor_fallbacks"
INVARIANTS = "invariants"
DEFENDED = "defended"
OPEN = "open"

AT_ONCE = 2**26
"""Weights of candidates held at one time: 64 million entries are half a gigabyte in float64."""

PASSES_AT_ONCE = 1024
"""Candidate-example pairs evaluated at one time."""


def orthogonal_directions(drawn: Tensor, gradient: Tensor) -> Tensor:
    """Return the part of each row of ``drawn`` (T, ...) orthogonal to ``gradient`` (...), with the norm of ``gradient``.

    In float64. Zero where there is no such direction: a tensor of one entry has no orthogonal complement, and a zero gradient has
    no norm to keep.
    """
    count = drawn.shape[0]
    rows, flat = drawn.reshape(count, -1).double(), gradient.reshape(-1).double()
    size = flat.abs().amax() if flat.numel() else flat.sum()
    if flat.numel() < 2 or not bool(size > 0):
        return torch.zeros((count, *gradient.shape), dtype=torch.float64, device=gradient.device)
    # Scaled first, so that squares of tiny or huge entries neither vanish nor overflow.
    length = torch.linalg.vector_norm(flat / size)
    unit = flat / size / length
    # Twice: after one projection of a nearly parallel draw, rounding is all that is left along the gradient.
    for _ in range(2):
        rows = rows - (rows @ unit).unsqueeze(1) * unit
    rows = rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min(1e-300)
    found: Tensor = (rows * length * size).reshape(count, *gradient.shape)
    return found


@dataclass(frozen=True)
class Selection:
    """What came of the trials.

    Attributes:
        weights: The candidate with the lowest loss.
        loss: Its loss; NaN where none could be evaluated.
        start: Loss before the step; NaN likewise.
    """

    weights: Named
    loss: float = math.nan
    start: float = math.nan

    @property
    def fell_back(self) -> bool:
        """Whether no candidate lowered the loss; the paper's algorithm then sends the raw gradient."""
        return not self.loss < self.start


def select_candidate(chunks: Iterator[Named], view: ClientView, like: Named) -> Selection:
    """Return the candidate after whose step the loss on the client's own batch is lowest.

    The candidates of a chunk (leading axis) are evaluated in one batched pass, in float64 where the model permits. The step is
    the real one: the learning rate times a gradient, or the update itself where weights are shared. A loss that is not finite
    loses. Where nothing can be evaluated (no batch, or tensors that are not the model's) the first candidate is taken.
    """
    batch, learner = view.batch, view.learner
    if batch is None or {n: v.shape for n, v in like.items()} != {n: v.shape for n, v in learner.weights.items()}:
        return Selection({n: v[0] for n, v in next(chunks).items()})
    try:
        exact = learner.to(torch.float64)
        start = float(exact.objective(exact.weights, *_as_double(batch)))
        inputs, targets = _as_double(batch)
    except (RuntimeError, TypeError):
        # Some accelerators and some hand-written layers have no double precision.
        exact, (inputs, targets) = learner, (batch.inputs, batch.targets)
        start = float(exact.objective(exact.weights, inputs, targets))
    rate = learner.settings.learning_rate if learner.settings.shares == "gradient" else 1.0

    def loss_after(candidate: Named) -> Tensor:
        return exact.objective({n: w - rate * candidate[n].to(w) for n, w in exact.weights.items()}, inputs, targets)

    best: Selection | None = None
    for chunk in chunks:
        losses = vmap(loss_after)(chunk)
        losses = torch.where(torch.isfinite(losses), losses, torch.inf)
        index = int(losses.argmin())
        if best is None or float(losses[index]) < best.loss:
            best = Selection({n: v[index].clone() for n, v in chunk.items()}, float(losses[index]), start)
    assert best is not None  # there is at least one trial
    return best


def _as_double(batch: Batch) -> tuple[Tensor, Tensor]:
    return batch.inputs.double(), batch.targets.double() if batch.targets.is_floating_point() else batch.targets


def fallback_rate(states: Sequence[State]) -> float | None:
    """Return the share of defended rounds in which no candidate lowered the loss, over the states of many clients.

    Args:
        states: What the clients' defenses kept, alone or in chains.

    Returns:
        A share, or None where no client was in a defended round.
    """
    totals = {name: 0 for name in (ROUNDS, FALLBACKS)}
    for state in states:
        for name, value in state.items():
            last = name.rpartition("/")[2]
            if last in totals:
                totals[last] += int(value)
    return totals[FALLBACKS] / totals[ROUNDS] if totals[ROUNDS] else None


@dataclass(frozen=True)
class CensorAdversary(OpenAdversary):
    """Knows what the projection cannot hide: every tensor's norm, and that the gradient is orthogonal to what was sent.

    These are two numbers per tensor (two in all for ``scope = "whole"``), both exact at the truth; far too few to determine an
    image, but enough to *confirm* a record one already has; and the angle of the last bias names the label of one example.
    Rounds in which the defense rests are compared entry by entry, and then the others not at all: beside an exact gradient two
    numbers per tensor add nothing but a stiffer search. Tensors seen as zero are left out. Of an aggregate both hold only
    roughly: norms and angles of its parts are not seen.

    Attributes:
        scope: As the defense's.
        active_rounds: As the defense's.
    """

    scope: Scope
    active_rounds: int

    def _defended(self, observation: Observation, index: int) -> bool:
        return self.active_rounds == 0 or observation.updates[index].round < self.active_rounds

    def arrives(self, observation: Observation) -> WhatArrives:
        """Say that nothing is exact in a defended round and everything in one without, and how the last bias names the label.

        Incomplete for an aggregate; of one client nothing else is sent, but which of the random trials had the lowest loss. The
        label is not told where all tensors are projected together, nor by a sum of steps.
        """
        told, defended = super().arrives(observation), self._defended(observation, 0)
        orthogonal = self.scope != "whole" and defended and observation.learner.settings.shares == "gradient"
        return told.replace(
            exact=frozenset if defended else told.exact,
            incomplete=observation.threat.clients > 1,
            least_protected_round=next((i for i in range(len(observation.updates)) if not self._defended(observation, i)), 0),
            label_evidence=_label_by_angle if orthogonal else None,
        )

    def evidence(self, observation: Observation, round_index: int) -> Named:
        """Return the update, and how much its invariants and its entries count."""
        seen = observation.updates[round_index].weights
        reference = next(iter(seen.values()))
        rests = [not self._defended(observation, index) for index in range(len(observation.updates))]
        flags = {DEFENDED: float(not any(rests)), OPEN: float(rests[round_index])}
        return {**with_prefix(seen, OBSERVED), **{name: reference.new_full((), value) for name, value in flags.items()}}

    def compare(self, evidence: Named, simulated: Named, variables: Named) -> Comparison:
        """Compare norms and angles, or entries where a round without defense was seen; the other part is zero on both sides.

        With o what was sent and g the simulated gradient of a tensor, |g| / |o| = 1 and <g, o> / |o|² = 0. A constant keeps
        objectives that are blind to scale from ignoring a factor common to all.
        """
        observed, defended = prefixed(evidence, OBSERVED), evidence[DEFENDED]
        groups = [list(observed)] if self.scope == "whole" else [[name] for name in observed if observed[name].numel() > 1]
        left, right = [], []
        for names in groups:
            size = torch.stack([observed[n].square().sum() for n in names]).sum()
            seen = (size > 0).to(size)
            safe = torch.where(size > 0, size, torch.ones_like(size))
            own = torch.stack([simulated[n].square().sum() for n in names]).sum()
            along = torch.stack([(simulated[n] * observed[n]).sum() for n in names]).sum()
            left += [seen * (own / safe + 1e-24).sqrt(), seen * along / safe]
            right += [seen, torch.zeros_like(seen)]
        constant = torch.full_like(defended, math.sqrt(max(1, len(groups))))
        invariants = torch.stack([*left, constant]) * defended
        expected = torch.stack([*right, constant]) * defended
        resting = evidence[OPEN]
        return Comparison(
            {**{n: v * resting for n, v in simulated.items()}, INVARIANTS: invariants},
            {**{n: v * resting for n, v in observed.items()}, INVARIANTS: expected},
        )


def _label_by_angle(bias: Tensor, prediction: Callable[[], Tensor]) -> Tensor:
    """Return log |o_c - <o, p>|: the bias gradient of one example is p - e_y, and o is orthogonal to it, so o_y = <o, p>.

    The global model's mean prediction stands for p. In logarithms, because of the label's nothing is left but rounding.
    """
    return (bias - (bias * prediction()).sum()).abs().clamp_min(torch.finfo(bias.dtype).tiny).log()


@DEFENSES.register(
    DefenseCard(
        name="censor",
        summary="Sends a random direction orthogonal to the update and as long, the best of several trials by their loss.",
        paper="Zhang et al., CENSOR: Defense Against Gradient Inversion via Orthogonal Subspace Bayesian Sampling, NDSS 2025",
        url="https://censor-gradient.github.io",
        cost="one random vector and one forward pass per trial; an orthogonal step does not train, so rounds are lost",
        weakness="rounds after the defended ones are raw; norms and angles give the label away and let anyone confirm a record "
        "they already have",
        acts_on=("update",),
        ladder=({"active_rounds": 1}, {"active_rounds": 5}, {"active_rounds": 10}, {"active_rounds": 0}),
        random=True,
        secure_aggregation=True,
    )
)
@dataclass(frozen=True, kw_only=True)
class Censor(Defense):
    """CENSOR: ``o_l = r_l - (<r_l, g_l> / <g_l, g_l>) g_l``, scaled to ``‖g_l‖``; of T draws of r, the one with the lowest loss.

    The loss is that on the client's own batch after a step along the candidate.
    The orthogonal part is computed in float64 and holds to the rounding of what is sent. With ``scope = "whole"`` all tensors
    are one vector. A tensor of one entry has no orthogonal complement and is sent as zero; a zero tensor stays zero; in scope
    ``whole`` both are parts of the vector like any other.

    Departs from the paper: **never the raw gradient.** Algorithm 1 sends it where no trial lowers the loss, which for exactly
    orthogonal directions is the usual case, since their first-order effect is zero; we send the best orthogonal candidate. The
    released projection, which lacks a factor ‖g‖ and is not orthogonal, its step of 1e-4 and the raw fallback are in
    `gradveil.testing.released_censor`, to be measured and rejected. The paper says "the first few rounds"; the released code
    ten, the SVDefense paper five. Equation 11's orthogonality to every example and label is in neither algorithm nor code, nor
    here. After several local steps there is no one gradient: the finished update takes its place, candidates are judged by the
    loss at the weights they lead to, and the first-order argument no longer holds. ``sampling = "public"`` takes gradients of
    public inputs (as many as the batch has) with random labels; where a client has no public inputs, or targets are not
    classes, it draws from the normal law instead.

    Cost: T forward passes in one batch. Known weakness: `CensorAdversary`, and above all the first undefended round. How often no
    trial lowered the loss is kept in the state; see `fallback_rate`.

    Attributes:
        trials: Candidates drawn per round (T).
        scope: ``layer`` projects each tensor by itself, ``whole`` all together.
        sampling: ``normal`` draws from N(0, 1), ``public`` from gradients of public inputs.
        active_rounds: Defended rounds, counted from the first; 0 defends always.
    """

    trials: int = 20
    scope: Scope = "layer"
    sampling: Sampling = "normal"
    active_rounds: int = 5

    def __post_init__(self) -> None:
        """Refuse settings without a meaning."""
        for name, least in (("trials", 1), ("active_rounds", 0)):
            value = getattr(self, name)
            check_number("censor", name, value if isinstance(value, int) else None, least=least)
        check_choice("censor", "scope", self.scope, ("layer", "whole"))
        check_choice("censor", "sampling", self.sampling, ("normal", "public"))

    def prepare(self, data: Batch, view: ClientView) -> State:
        """Begin counting."""
        return {name: torch.zeros((), dtype=torch.int64) for name in (ROUNDS, FALLBACKS)}

    def protect_update(self, update: Update, view: ClientView, state: State) -> tuple[Update, State]:
        """Send the best orthogonal candidate, and count whether the paper's algorithm would have fallen back."""
        check_finite(update.weights)
        if self.active_rounds and view.round >= self.active_rounds:
            return update, state
        with torch.no_grad():
            chosen = select_candidate(self._candidates(update.weights, view), view, update.weights)
        counted = {**state}
        for name, more in ((ROUNDS, 1), (FALLBACKS, int(chosen.fell_back))):
            counted[name] = state.get(name, torch.zeros((), dtype=torch.int64)) + more
        return update.replace(weights={n: chosen.weights[n].to(v.dtype) for n, v in update.weights.items()}), counted

    def needs(self) -> frozenset[Need]:
        """Ask for the batch and its loss: the candidate is kept after whose step the loss is lowest."""
        return super().needs() | {"batch", "loss"}

    def adversary(self) -> OpenAdversary:
        """Return the attacker who matches norms and angles, and everything where nothing was done."""
        return CensorAdversary(self.scope, self.active_rounds)

    def _candidates(self, gradient: Named, view: ClientView) -> Iterator[Named]:
        """Yield the candidates, some at a time (leading axis)."""
        draw = _Draw.of(self.sampling, gradient, view)
        entries = sum(value.numel() for value in gradient.values())
        examples = 1 if view.batch is None else len(view.batch)
        most = max(1, min(AT_ONCE // max(1, entries), PASSES_AT_ONCE // max(1, examples)))
        for begin in range(0, self.trials, most):
            yield self._project(draw.some(min(most, self.trials - begin)), gradient)

    def _project(self, drawn: Named, gradient: Named) -> Named:
        """Return the candidates made of what was drawn."""
        if self.scope == "whole":
            rows = torch.cat([value.reshape(len(value), -1) for value in drawn.values()], dim=1)
            found = orthogonal_directions(rows, flatten(gradient))
            return vmap(lambda row: unflatten(row, gradient))(found)
        return {name: orthogonal_directions(drawn[name], value) for name, value in gradient.items()}


@dataclass
class _Draw:
    """Draws directions: normal ones, or gradients of public inputs."""

    gradient: Named
    view: ClientView
    generator: torch.Generator
    classes: int = 0
    public: Tensor = field(default_factory=lambda: torch.empty(0))

    @classmethod
    def of(cls, sampling: Sampling, gradient: Named, view: ClientView) -> _Draw:
        generator = view.generator("censor")
        plain = cls(gradient, view, generator)
        batch, learner = view.batch, view.learner
        if sampling == "normal" or view.public is None or len(view.public) == 0 or batch is None:
            return plain
        if batch.targets.is_floating_point() or gradient.keys() != learner.weights.keys():
            return plain
        classes = int(learner.logits(learner.weights, batch.inputs).shape[1])
        return cls(gradient, view, generator, classes, view.public.to(batch.inputs))

    def some(self, count: int) -> Named:
        normal = {n: self._normal((count, *v.shape)) for n, v in self.gradient.items()}
        if not self.classes:
            return normal
        size = len(self.view.batch) if self.view.batch is not None else 1
        device = self.generator.device
        picked = torch.randint(len(self.public), (count, size), generator=self.generator, device=device)
        labels = torch.randint(self.classes, (count, size), generator=self.generator, device=device)
        learner = self.view.learner
        with torch.enable_grad():
            found = vmap(lambda x, y: learner.gradient(learner.weights, x, y))(self.public[picked], labels)
        squares = torch.stack([v.double().square().reshape(count, -1).sum(1) for v in found.values()]).sum(0)
        typical = (squares / sum(v[0].numel() for v in found.values())).sqrt()
        trace = 1e-6 * torch.where(typical > 0, typical, torch.ones_like(typical))
        # Where a public gradient is zero or parallel to the client's own, the trace of a normal draw gives a direction.
        return {n: v.double() + trace.reshape(-1, *(1,) * (v.ndim - 1)) * normal[n] for n, v in found.items()}

    def _normal(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.generator.device, dtype=torch.float64)
