"""The shadow defense: noise on the pixels that an imagined attacker rebuilds best, less of it where the task looks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from gradveil.adversary import OpenAdversary
from gradveil.defenses.base import DEFENSES, ClientView, Defense, DefenseCard, Need, State
from gradveil.defenses.shadow.fit import Terms, choose_generator, fine_tune, fit_codes, generator_on, imagine, observe, styles_of
from gradveil.defenses.shadow.memory import Memory, record_keys
from gradveil.defenses.shadow.noise import (
    SCHEDULES,
    amplitude,
    error_map,
    foreground_map,
    foreground_weight,
    reduce_foreground,
    relative_noise,
    scaled_noise,
)
from gradveil.errors import UsageError
from gradveil.learning.learner import Learner
from gradveil.models.grad_cam import grad_cam_pp
from gradveil.records import Batch
from gradveil.study.checks import check_choice, check_flag, check_number, check_whole
from gradveil.tensors import Named, check_finite

__all__ = ["Shadow"]

TERMS = Terms()
QUICK_CODES, QUICK_FITS = 10, 1
TOGETHER = 64
"""Most images whose latent codes are fitted at once, and most of a minibatch that is imagined at once: memory."""


@DEFENSES.register(
    DefenseCard(
        name="shadow",
        summary="Adds noise to each training image where an imagined attacker with a generator rebuilds it best.",
        paper="Jiang, Ma and Yang, Shadow defense against gradient inversion attack in federated learning, 2025",
        url="https://github.com/tekap404/ShadowDef",
        cost="500 passes through a generator per record once, five double-backward passes per step in the first 20 rounds, three "
        "passes instead of one afterwards; a client keeps a noise map per record, and the generator's weights for 20 rounds",
        weakness="the update is exact for the noisy image, and the noise lies on few pixels at a known height: a filter learned "
        "from public pictures takes most of it off",
        acts_on=("data",),
        ladder=({"strength": 0.05}, {"strength": 0.1}, {"strength": 0.19}, {"strength": 0.4}),
        off={"strength": 0.0},
        random=True,
    )
)
@dataclass(frozen=True, kw_only=True)
class Shadow(Defense):
    """Train on x + N, with N large where a generator fitted to the client's own images and gradients rebuilds them well.

    Once per record a latent code is fitted, ``min ‖G(z) - x‖²``. In every round until termination the client takes one pseudo
    step on clean data, fine-tunes the synthesis part of its shadow G on what that step would show (gradients, BatchNorm
    statistics) and on the images, and reads the error map M = ‖x - G(z)‖² per pixel. Then, per image,

        N¹ = 1 / σ(M / T),  N² = σ(equalise(N¹) / T),  N³ ← β N³ + (1 - β) N²,  N⁴ = N³ - a sign(N³) σ(top(L) / T),
        N = max(x) w / max |N⁴| · N⁴,   w = α e^(r/R),   a = min(a_max, max(a_min, r/R)),

    with σ the softmax over the pixels and L the Grad-CAM++ map of the pseudo-updated model at the true label. The shadow follows
    by ``θ ← γ θ + (1 - γ) θ'``. After round ``until`` the maps N³ are kept as they are, and only the foreground is looked at
    anew.

    Departs from the paper: (1) the hook runs before local training, so all minibatches of a round take their pseudo step from
    the global weights instead of the weights the minibatches before left. (2) Inputs stay in [0, 1]: x + N is clamped. (3) It
    divides by max |N⁴| instead of max(N⁴), which may be zero or negative. (4) T = 20 and the weights of the fine-tuning loss are
    nowhere in the paper; they are those of its released code. (5) ``decrease`` has no formula there; here it is the mirror image
    of ``increase``. (6) The pseudo step and the imagined one use BatchNorm in the same mode, and its term is absent where the
    model has no BatchNorm on the statistics of the batch. (7) One learning rate for all clients (the paper has three). (8) A
    small style generator of 32 or 64 pixels stands for StyleGAN3, resized to the image. (9) A model without feature maps has no
    foreground. The released code differs further, see `gradveil.testing.released_shadow`.

    Cost: see the card. Records are known by their ids, or by a hash of their pixels where they have none. A record first seen
    after termination is fitted then. The state of a client is 4 H W bytes per record, and until termination 4 L bytes per record
    and the synthesis weights (single precision, so that a resumed run is equal to the bit).

    Known weakness: `gradveil.defenses.shadow.adversary.ShadowAdversary`. N has no randomness but the start of the latent codes,
    is mostly of one sign, and at T = 20 most pixels get almost none of it: a filter learned from public pictures takes it off.
    With T = 20 the foreground map is nearly flat.

    Attributes:
        strength: α, the largest noise of an image relative to its largest value, at the start; 0 is off.
        schedule: ``increase``, ``fix`` or ``decrease`` over the rounds.
        rounds: R, how many rounds the training will have; later ones count as the last.
        until: The round from which the shadow is not updated any more.
        generator: Name or path of a style generator; ``auto`` goes by channels and size of the images.
        latent_steps: Most steps that fit a latent code; 0 leaves it random.
        latent_rate: Their learning rate.
        patience: Steps without a smaller error that end the fit of a code.
        fit_steps: Steps that fine-tune the synthesis part, per minibatch; 0 leaves it as it is.
        fit_rate: Their learning rate.
        shadow_momentum: γ, share of the old shadow.
        noise_momentum: β, share of the old noise map.
        equalised: Whether the histogram is equalised.
        temperature: T of every softmax.
        foreground: Share of the pixels that count as foreground; 0 leaves the foreground as noisy as the rest.
        foreground_least: a_min.
        foreground_most: a_max.
        layer: Where Grad-CAM++ reads the model; ``auto`` is its last layer of feature maps.
    """

    strength: float = 0.19
    schedule: Literal["increase", "fix", "decrease"] = "increase"
    rounds: int = 100
    until: int = 20
    generator: str = "auto"
    latent_steps: int = 500
    latent_rate: float = 1e-3
    patience: int = 5
    fit_steps: int = 5
    fit_rate: float = 1e-3
    shadow_momentum: float = 0.5
    noise_momentum: float = 0.9
    equalised: bool = True
    temperature: float = 20.0
    foreground: float = 0.3
    foreground_least: float = 0.1
    foreground_most: float = 0.5
    layer: str = "auto"

    def __post_init__(self) -> None:
        """Refuse amounts, shares and counts that mean nothing."""
        for name in ("strength",):
            check_number("shadow", name, getattr(self, name))
        for name in ("latent_rate", "fit_rate", "temperature"):
            check_number("shadow", name, getattr(self, name), open_below=True)
        for name in ("shadow_momentum", "noise_momentum"):
            check_number("shadow", name, getattr(self, name), below=1.0)
        for name in ("foreground", "foreground_least", "foreground_most"):
            check_number("shadow", name, getattr(self, name), below=1.0 + 1e-9)
        for name, least in (("rounds", 1), ("until", 0), ("latent_steps", 0), ("patience", 1), ("fit_steps", 0)):
            check_whole("shadow", name, getattr(self, name), least)
        check_flag("shadow", "equalised", self.equalised)
        check_choice("shadow", "schedule", self.schedule, SCHEDULES)
        if self.foreground_least > self.foreground_most:
            raise UsageError(
                f"shadow: foreground_least {self.foreground_least} is above foreground_most {self.foreground_most}; swap them"
            )

    def protect_batch(self, batch: Batch, view: ClientView, state: State) -> tuple[Batch, State]:
        """Add each image's noise, and remember what the next round needs."""
        check_finite({"inputs": batch.inputs}, "the batch")
        if self.strength == 0 or len(batch) == 0:
            return batch, state
        noise, state = self.noise(batch, view, state)
        return batch.replace(inputs=(batch.inputs + noise).clamp(0, 1)), state

    def noise(self, batch: Batch, view: ClientView, state: State) -> tuple[Tensor, State]:
        """Return N (B, 1, H, W) for every image of a batch, not clamped, and the state after it."""
        network = _network(self.generator, batch.inputs)
        memory, keys = Memory.read(state), record_keys(batch)
        updated = view.round < self.until
        strangers = [row for row, key in enumerate(keys) if key not in (memory.codes if updated else memory.maps)]
        codes = self._fitted(network, memory, batch.inputs[strangers], view) if strangers else None
        if codes is not None:
            memory = memory.with_codes([keys[row] for row in strangers], codes)
        parts = []
        for rows in self._minibatches(len(batch), view.learner):
            part = Batch(batch.inputs[rows], batch.targets[rows])
            found, memory = self._step(network, part, [keys[row] for row in rows], rows, view, memory)
            parts.append(found)
        return torch.cat(parts), memory.write(finished=not updated)

    def _fitted(self, network: nn.Module, memory: Memory, images: Tensor, view: ClientView) -> Tensor:
        """Return latent codes of images seen for the first time, from the client's own random start."""
        latent = int(network.latent)  # type: ignore[arg-type]
        start = torch.randn((len(images), latent), generator=view.generator("shadow codes"), device=images.device)
        # Fitted to the generator as it came: where a code ends does not depend on what the shadow learned from other records.
        weights = _synthesis(network)
        parts = [
            fit_codes(network, weights, own, z, steps=self.latent_steps, rate=self.latent_rate, patience=self.patience)
            for own, z in zip(images.split(TOGETHER), start.split(TOGETHER), strict=True)
        ]
        return torch.cat(parts)

    def _minibatches(self, count: int, learner: Learner) -> list[list[int]]:
        """Return the rows of each pseudo step: as in local training; a last one alone joins those before it."""
        size = min(learner.settings.minibatch or count, TOGETHER)
        parts = [list(range(start, min(start + size, count))) for start in range(0, count, size)]
        if len(parts) > 1 and len(parts[-1]) == 1:
            # BatchNorm on the statistics of the batch has none of a single record.
            parts[-2:] = [parts[-2] + parts[-1]]
        return parts

    def _step(
        self, network: nn.Module, batch: Batch, keys: list[int], rows: list[int], view: ClientView, memory: Memory
    ) -> tuple[Tensor, Memory]:
        """One minibatch: pseudo step, imagined attack, noise maps, foreground, noise."""
        learner, updated = view.learner, view.round < self.until
        handed = learner.noise_at(0, rows)
        progress = min(1.0, view.round / self.rounds)
        renewed = [place for place, key in enumerate(keys) if updated or key not in memory.maps]
        wanted = bool(renewed) and self.fit_steps > 0
        real = observe(learner, batch.inputs, batch.targets, handed) if wanted or self.foreground else None
        if renewed:
            own = Batch(batch.inputs[renewed], batch.targets[renewed])
            names = [keys[place] for place in renewed]
            shadow = memory.shadow or _synthesis(network)
            imagined = shadow
            codes = torch.stack([memory.codes[name] for name in names])
            if wanted and real is not None:
                part = {n: v[renewed] for n, v in handed.items()}
                # After termination only some of a minibatch may be new; an attacker compares with the update of those.
                seen = real if len(own) == len(batch) else observe(learner, own.inputs, own.targets, part)
                fixed = (network, shadow, codes, own.inputs, own.targets, learner, part, seen)
                imagined = fine_tune(*fixed, terms=TERMS, steps=self.fit_steps, rate=self.fit_rate)
            memory = memory.with_maps(names, self._renewed(network, imagined, codes, own.inputs, names, memory))
            if updated and wanted:
                share = self.shadow_momentum
                memory = memory.with_shadow({n: share * w + (1 - share) * imagined[n] for n, w in shadow.items()})
        maps = torch.stack([memory.maps[key] for key in keys]).to(batch.inputs.dtype)
        if self.foreground and real is not None:
            weight = foreground_weight(progress, self.foreground_least, self.foreground_most)
            maps = reduce_foreground(maps, self._foreground(learner, real.gradient, batch, handed), weight)
        return scaled_noise(maps, batch.inputs, amplitude(self.strength, progress, self.schedule)), memory

    def _renewed(
        self, network: nn.Module, weights: Named, codes: Tensor, images: Tensor, names: list[int], memory: Memory
    ) -> Tensor:
        """Return N³: the momentum of each record's map, or its first N²."""
        with torch.no_grad():
            pictures = imagine(network, styles_of(network, codes), weights, images)
            fresh = relative_noise(error_map(images, pictures), self.temperature, equalised=self.equalised).float()
        before = torch.stack([memory.maps.get(name, new) for name, new in zip(names, fresh, strict=True)])
        return self.noise_momentum * before + (1 - self.noise_momentum) * fresh

    def _foreground(self, learner: Learner, gradient: Named, batch: Batch, handed: Named) -> Tensor:
        """Return L_CAM of the model after its pseudo step, at the true label."""
        rate = learner.settings.learning_rate
        stepped = {name: value - rate * gradient[name] for name, value in learner.weights.items()}

        def forward(inputs: Tensor) -> Tensor:
            return learner.logits(stepped, inputs, handed)

        saliency = grad_cam_pp(forward, learner.model, batch.inputs, batch.targets, layer=self.layer)
        return foreground_map(saliency, self.foreground, self.temperature)

    def quick(self) -> Shadow:
        """Return the same with few steps per latent code and one of fine-tuning."""
        codes, fits = min(self.latent_steps, QUICK_CODES), min(self.fit_steps, QUICK_FITS)
        return dataclasses.replace(self, latent_steps=codes, fit_steps=fits)

    def needs(self) -> frozenset[Need]:
        """Ask for the loss: the shadow is fitted to the label as the model sees it."""
        return super().needs() | ({"loss"} if self.strength else set())

    def adversary(self) -> OpenAdversary:
        """Return the attacker who makes noise by the same recipe and takes it off."""
        from gradveil.defenses.shadow.adversary import ShadowAdversary

        return ShadowAdversary(self) if self.strength else OpenAdversary()


def _network(name: str, images: Tensor) -> nn.Module:
    chosen = choose_generator(name, images)
    return generator_on(chosen, images.device, max(images.shape[2:]))


def _synthesis(network: nn.Module) -> Named:
    return dict(network.synthesis.named_parameters())  # type: ignore[union-attr]
