"""Noise along the singular vectors of d(shared)/d(input): what the three InvL defenses share (Xu et al. 2025, section 3.3).

With J = U Σ Vᵀ, σ_1 ≥ σ_2 ≥ …, the paper keeps Gaussian noise only where an inverter would feel it: on data along v_1 … v_k, on
what is shared along u_{j+1} … u_k. V needs only the Gram matrix JᵀJ (m × m). U is never formed: with n ~ N(0, δ I)

    U_{j:k} n = J (V_{j:k} Σ_{j:k}⁻¹ n),

one forward product, and U_{j:k} n has the law of U_{j:k} U_{j:k}ᵀ ε with ε ~ N(0, δ I) in all p dimensions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.func import jvp, vmap

from gradveil.errors import UsageError
from gradveil.learning.embedding import EmbeddingLearner
from gradveil.learning.learner import Learner
from gradveil.randomness import Seed
from gradveil.study.checks import check_choice, check_number, check_whole
from gradveil.tensors import Named

if TYPE_CHECKING:
    # The room of risk reads defenses; at run time it is opened only when a basis is made.
    from gradveil.spectra.jacobians import Jacobian
    from gradveil.spectra.spectrum import Spectrum

__all__ = [
    "QUICK",
    "BasisMode",
    "NoiseRange",
    "Rule",
    "average_jacobian",
    "check_basis",
    "check_share",
    "class_centres",
    "leading_count",
    "left_basis",
    "noise_range",
    "noisy_ranks",
    "public_centres",
    "record_jacobian",
    "right_bases",
    "right_basis",
]

Rule = Literal["sum", "energy", "count"]
RULES = ("sum", "energy", "count")
BasisMode = Literal["auto", "dense", "gram", "leading"]
BASIS_MODES = ("auto", "dense", "gram", "leading")
AT_ONCE = 32_000_000
"""Entries of the Jacobians of several records that are formed together; larger ones go one by one."""
QUICK = 64
"""Directions in which attackers who simulate a defense hundreds of times let it add noise."""
TIED = 1e-6
"""Share of σ_1 up to which two singular values are one."""
REACHED = 0.1
"""Share of the directions between both shares that must be left for noise to be worth adding."""
DETERMINED = {torch.float64: 1e-6, torch.float32: 1e-4}
"""Share of σ_1 below which rounding of the Gram matrix, and not the model, decides a singular vector."""


def check_basis(owner: str, rule: object, mode: object, most: object) -> None:
    """Refuse unknown rules and modes, and a cap on the rank that leaves nothing."""
    check_choice(owner, "rule", rule, RULES)
    check_choice(owner, "mode", mode, BASIS_MODES)
    check_whole(owner, "most", most, 1)


def check_share(owner: str, setting: str, value: object, *, least: float = 0.0) -> None:
    """Refuse anything but a share of the singular values, from ``least`` to 1."""
    check_number(owner, setting, value, least=least, below=math.nextafter(1.0, 2.0))


def leading_count(values: Tensor, share: float, rule: str = "sum", *, beyond: float = 0.0, count: int | None = None) -> int:
    """Return how many leading singular values hold ``share`` of all.

    Args:
        values: σ_1 ≥ σ_2 ≥ ….
        share: In [0, 1].
        rule: ``sum`` of σ, as the paper says; ``energy``: of σ²; ``count``: of their number.
        beyond: What the values that are not here add to the sum or energy, where only leading ones are known.
        count: How many values there are in all, for ``count``; by default those given.

    >>> [leading_count(torch.tensor([4.0, 3.0, 2.0, 1.0]), 0.6, rule) for rule in ("sum", "energy", "count")]
    [2, 2, 3]
    """
    sigma = values.double()
    if len(sigma) == 0 or share <= 0 or float(sigma[0]) <= 0:
        return 0
    if rule == "count":
        return min(len(sigma), math.ceil(round(share * (len(sigma) if count is None else count), 9)))
    held = (sigma if rule == "sum" else sigma.square()).cumsum(0)
    # A hair below: rounding must not ask for one more than an exact share.
    wanted = share * (float(held[-1]) + beyond) * (1 - 1e-12)
    return min(len(sigma), int((held < wanted).sum()) + 1)


def _count(found: Spectrum, share: float, rule: str) -> int:
    """Apply a rule to a spectrum; in mode ``leading`` the rest of the sum is the area under the estimated tail."""
    beyond = 0.0
    if not found.whole and found.tail_ranks is not None and found.tail_values is not None:
        widths = found.tail_ranks.diff(prepend=found.tail_ranks.new_tensor([float(len(found.values))])).clamp(min=0)
        beyond = float((widths * found.tail_values.pow(1 if rule == "sum" else 2)).sum())
    return leading_count(found.values, share, rule, beyond=beyond, count=min(found.inputs, found.outputs))


def noisy_ranks(found: Spectrum, *, low: float, high: float, rule: str, most: int) -> tuple[int, int]:
    """Return j and k: the singular values after the first j, up to the k-th, are those whose directions get noise.

    Values tied with the k-th, or with the first after j, count with it: no decomposition tells their vectors apart. On a spectrum
    so steep that both shares end at the same value, one direction keeps its noise.
    """
    if found.dead:
        return 0, 0
    last = min(_tie_end(found.values, _count(found, high, rule)), most)
    first = min(_count(found, low, rule), max(0, last - 1)) if low > 0 else 0
    return len(found.values) - _tie_end(-found.values.flip(0), len(found.values) - first), last


def _tie_end(values: Tensor, count: int) -> int:
    """Return ``count``, moved on over values equal to the last one counted, largest first."""
    gaps = values[:-1] - values[1:] if len(values) > 1 else values.new_zeros(0)
    if len(values) == 0:
        return count
    ends = torch.cat([gaps > TIED * float(values.abs().max()), torch.ones(1, dtype=torch.bool, device=values.device)])
    return count if count == 0 else count + int(ends[count - 1 :].to(torch.uint8).argmax())


def right_basis(jacobian: Jacobian, *, share: float, rule: str, mode: str, most: int) -> Tensor:
    """Return v_1 … v_k of one record as rows (k, m); none where nothing shared depends on the input."""
    from gradveil.spectra.spectrum import choose_mode, spectrum

    chosen = choose_mode(jacobian) if mode == "auto" else mode
    found = spectrum(jacobian, mode=chosen, leading=min(most, jacobian.inputs), right=True, seed=Seed(0))
    _, kept = noisy_ranks(found, low=0.0, high=share, rule=rule, most=most)
    if found.right is None or kept == 0:
        return jacobian.at.new_zeros((0, jacobian.inputs))
    return found.right[:, :kept].T.to(jacobian.at)


def record_jacobian(learner: Learner, record: Tensor, target: Tensor) -> Jacobian:
    """Return the Jacobian of what is shared about one record: its embedding, or its gradient at the learner's weights."""
    from gradveil.spectra.jacobians import Jacobian, check_records_are_separate, gradient_jacobian

    if isinstance(learner, EmbeddingLearner):
        check_records_are_separate(learner)
        party = learner
        return Jacobian(lambda x: party.embed(x.unsqueeze(0))[0], record)
    # An adapted model is taken at the mean of the noise it draws.
    noise = {name: value.new_zeros((1, 1, *value.shape[2:])) for name, value in learner.noise.items()}
    learner = learner.replace(settings=learner.settings.replace(shares="gradient", local_steps=1, epochs=0), noise=noise)
    return gradient_jacobian(learner, record, target, dtype=record.dtype)


def right_bases(
    learner: Learner, inputs: Tensor, targets: Tensor, *, share: float, rule: str, mode: str, most: int
) -> list[Tensor]:
    """Return `right_basis` of every record's gradient or embedding; small Jacobians are decomposed many at a time.

    Raises:
        ReplaceLayer: BatchNorm on the statistics of the batch couples the records.
    """
    from gradveil.spectra.jacobians import check_records_are_separate

    check_records_are_separate(learner)
    size = learner.parameters * inputs[0].numel()
    alone = isinstance(learner, EmbeddingLearner) or bool(learner.noise)
    if mode in ("auto", "dense") and not alone and 2 * size <= AT_ONCE and most >= inputs[0].numel():
        chunk = max(1, AT_ONCE // size)
        pairs = zip(inputs.split(chunk), targets.split(chunk), strict=True)
        return [basis for x, y in pairs for basis in _bases_at_once(learner, x, y, share, rule)]
    return [
        right_basis(record_jacobian(learner, x, y), share=share, rule=rule, mode=mode, most=most)
        for x, y in zip(inputs, targets, strict=True)
    ]


def _bases_at_once(learner: Learner, inputs: Tensor, targets: Tensor, share: float, rule: str) -> list[Tensor]:
    """Form the Jacobians of all records by forward products, and decompose their Gram matrices as one batch."""
    from gradveil.spectra.jacobians import checked, guarded, load_forward_mode

    load_forward_mode()
    size, outputs = inputs[0].numel(), learner.parameters
    directions = torch.eye(size, dtype=inputs.dtype, device=inputs.device).reshape(size, *inputs.shape[1:])

    def column(direction: Tensor) -> Tensor:
        def gradients(x: Tensor) -> Named:
            return learner.per_example_gradients(learner.weights, x, targets)

        pair: Any = jvp(gradients, (inputs,), (direction.expand_as(inputs),))
        return torch.cat([value.reshape(len(inputs), -1) for value in pair[1].values()], dim=1)

    columns = checked(guarded(lambda: vmap(column, chunk_size=64)(directions))).detach().transpose(0, 1).double()  # (B, m, p)
    squares, vectors = torch.linalg.eigh(columns @ columns.transpose(1, 2))
    bases = []
    for own, right in zip(squares.flip(1), vectors.flip(2), strict=True):
        sigma = own.clamp(min=0).sqrt()[: min(size, outputs)]
        bases.append(right[:, : _tie_end(sigma, leading_count(sigma, share, rule))].T.to(inputs))
    return bases


def class_centres(inputs: Tensor, targets: Tensor, owner: str) -> tuple[Tensor, Tensor]:
    """Return the mean input of every class that is there (C', ...) and its class (C',), ascending; absent classes are skipped."""
    if targets.ndim != 1 or targets.is_floating_point():
        raise UsageError(f"{owner} takes the mean input of every class, so targets must be class numbers, one per record")
    classes = targets.unique()
    return torch.stack([inputs[targets == each].mean(0) for each in classes]), classes


def public_centres(learner: Learner, public: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean public input once for every class, and the classes: public inputs have no labels."""
    mean = public.to(next(iter(learner.weights.values()))).mean(0, keepdim=True)
    with torch.no_grad():
        classes = int(learner.logits(learner.weights, mean, learner.zero_noise(1)).shape[1])
    labels = torch.arange(classes, device=mean.device)
    return mean.expand(len(labels), *mean.shape[1:]), labels


class _Shifted(nn.Module):
    """A model at several centres at once, as a function of one shift common to all of them."""

    def __init__(self, inner: nn.Module, centres: Tensor) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("centres", centres)

    def forward(self, shift: Tensor) -> Any:
        """(1, ...) -> the outputs at all centres."""
        return self.inner(self.get_buffer("centres") + shift)


def average_jacobian(learner: Learner, centres: Tensor, labels: Tensor) -> Jacobian:
    """Return the mean over centres of d(gradient)/d(input), as the derivative of one batch gradient by a common shift.

    Args:
        learner: Model and loss, which must be a mean over examples.
        centres: (C, ...) inputs.
        labels: (C,) their classes.

    Raises:
        ReplaceLayer: BatchNorm on the statistics of the batch couples the centres.
    """
    from gradveil.spectra.jacobians import Jacobian, check_records_are_separate

    check_records_are_separate(learner)
    at, noise = torch.zeros_like(centres[0]), learner.zero_noise(len(centres))
    if noise:
        return Jacobian(lambda shift: learner.gradient(learner.weights, centres + shift, labels, noise), at)
    inner = {f"inner.{name}": value for name, value in learner.weights.items()}
    buffers = {f"inner.{name}": value for name, value in learner.buffers.items()} | {"centres": centres}
    shifted = learner.replace(model=_Shifted(learner.model, centres), weights=inner, buffers=buffers)
    return Jacobian(lambda shift: shifted.gradient(inner, shift.unsqueeze(0), labels), at, shifted, labels)


def left_basis(jacobian: Jacobian, scaled: Tensor) -> Tensor:
    """Return J times every row of ``scaled``, that is u_{j+1} … u_k, as rows (k - j, p).

    They are orthonormal up to rounding, and made so exactly: what an attacker projects out must be gone.
    """
    if len(scaled) == 0:
        return scaled.new_zeros((0, jacobian.outputs))
    rows: Tensor = torch.linalg.qr(jacobian.push(scaled).T)[0].T.contiguous()
    return rows


@dataclass(frozen=True)
class NoiseRange:
    """The directions u_{j+1} … u_k of one Jacobian, as v_i / σ_i.

    Attributes:
        scaled: (k - j, m) rows v_i / σ_i; J times a row is u_i.
        first: j, the leading directions without noise.
        last: k.
        wanted: The k that the share asks for; ``last`` is smaller where fewer could be found or were allowed.
    """

    scaled: Tensor
    first: int
    last: int
    wanted: int


def noise_range(
    jacobian: Jacobian, *, low: float, high: float, rule: str, mode: str, most: int, seed: Seed | None = None
) -> NoiseRange:
    """Return the directions between the first ``low`` and the first ``high`` share of the singular values.

    At least one direction carries noise where anything depends on the input: on a spectrum so steep that both shares end at the
    same value, j is one less than k. Directions that rounding decides, and ranks beyond ``most``, are left out.

    Raises:
        UsageError: After the spared ones less than a tenth of the range is left: noise on a direction or two would protect
            nothing and look as if it did.
    """
    from gradveil.spectra.spectrum import choose_mode, spectrum

    chosen = choose_mode(jacobian) if mode == "auto" else mode
    found = spectrum(jacobian, mode=chosen, leading=min(most, jacobian.inputs), right=True, seed=seed or Seed(0))
    if found.dead or found.right is None:
        return NoiseRange(jacobian.at.new_zeros((0, jacobian.inputs)), 0, 0, 0)
    sound = int((found.values > DETERMINED[jacobian.at.dtype] * found.values[0]).sum())
    start, wanted = _whole_range(found, low, high, rule)
    reach = min(most, sound, wanted)
    # Where nothing is spared, the leading ones up to ``most`` are what was asked for.
    if start and reach < wanted and reach - start < REACHED * (wanted - start):
        why = f"most = {most} ends" if most == reach else f"the {reach} that could be found end"
        raise UsageError(
            f"noise belongs on singular vectors {start + 1} to about {wanted}, and {why} before a tenth of them; set mode = "
            "'gram' and a larger most, or spare less"
        )
    first, last = noisy_ranks(found, low=low, high=high, rule=rule, most=min(most, sound))
    rows = (found.right[:, first:last] / found.values[first:last]).T
    return NoiseRange(rows.to(jacobian.at), first, last, max(last, wanted))


def _whole_range(found: Spectrum, low: float, high: float, rule: str) -> tuple[int, int]:
    """Return j and k as the shares ask for them, where only leading values are known on the estimated tail."""
    if found.whole or found.tail_ranks is None or found.tail_values is None:
        return _count(found, low, rule), _count(found, high, rule)
    known, total = len(found.values), min(found.inputs, found.outputs)
    ranks = found.tail_ranks.clamp(min=known).round().long()
    widths = ranks.diff(prepend=ranks.new_tensor([known])).clamp(min=0)
    values = torch.cat([found.values, found.tail_values.repeat_interleave(widths)])
    return leading_count(values, low, rule, count=total), leading_count(values, high, rule, count=total)
