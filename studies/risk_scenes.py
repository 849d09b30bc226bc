"""What the study of risk scores measures on: models, CIFAR-10 pictures, what is shared about them, risks and attacks."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.adversary import OpenAdversary
from gradveil.attacks.base import Attack, AttackContext, launch
from gradveil.attacks.deep_leakage import IDLG
from gradveil.attacks.engine.priors import total_variation
from gradveil.attacks.inverting_gradients import InvertingGradients
from gradveil.client.update import run_client
from gradveil.defenses import Defense, build_defense
from gradveil.defenses.none import NoDefense
from gradveil.defenses.parts.sparse_update import ZeroedEntriesAdversary
from gradveil.learning import Learner, loss_by_name
from gradveil.learning.embedding import EMBEDDING, EmbeddingLearner
from gradveil.metrics.mse import mean_squared_error
from gradveil.models import build_model
from gradveil.models.split import split_model
from gradveil.models.weights import load_weights
from gradveil.randomness import Seed
from gradveil.records import Batch, Knowledge, ModelSpec, Observation, ThreatModel, Update
from gradveil.risk.calibration import built_in_calibration
from gradveil.risk.exposure import DefendedRelease, defended_release
from gradveil.risk.invre import risk_score
from gradveil.spectra.jacobians import gradient_jacobian, jacobian_of
from gradveil.spectra.spectrum import DENSE_ENTRIES, Spectrum, spectrum
from gradveil.storage.files import write_whole
from gradveil.tensors import Named

CLASSES, SHAPE = 10, (3, 32, 32)
EPOCHS, BATCH, RATE = 12, 64, 3e-3
TV = 1e-7
"""Weight of total variation: the cosine of a LeNet's gradients is small, and 1e-4, the usual one, ends at 15 dB."""
KNOWS = ThreatModel(knows=ThreatModel().knows | {Knowledge.LABELS})
"""Labels are given: they are read off a single gradient exactly, and no embedding shows them."""


@dataclass(frozen=True)
class Scene:
    """A model and what is shared of it.

    Attributes:
        model: Spelling.
        cut: Name of the split point; empty where the gradient is shared.
        trained: Whether the weights are those after some epochs (LeNet), or a file's (``weights``).
        smooth: Whether attacks smooth the derivative of its ReLUs.
    """

    model: str
    cut: str = ""
    trained: bool = False
    smooth: bool = False


RESNET = "resnet20(normalize='imagenet')"
SCENES = {
    "lenet": Scene("lenet"),
    "lenet-trained": Scene("lenet", trained=True),
    "mlp": Scene("mlp", smooth=True),
    "convnet": Scene("convnet", smooth=True),
    "resnet20": Scene(RESNET, smooth=True),
    **{f"resnet20-cut{i}": Scene(RESNET, f"cut{i}") for i in (1, 2, 3)},
    **{f"resnet20-trained-cut{i}": Scene(RESNET, f"cut{i}", trained=True) for i in (1, 2, 3)},
    **{f"resnet18-cut{i}": Scene("resnet18(normalize='cifar10')", f"cut{i}") for i in (1, 2, 3)},
}
ITERATIONS = {"dlg": (10, 20, 50, 100, 200, 300), "ig": (25, 50, 100, 200, 400, 800)}


@dataclass(frozen=True)
class Place:
    """Where the study runs: files and device."""

    data: Path
    weights: str
    out: Path
    device: torch.device
    seed: int = 0

    @property
    def test_pictures(self) -> int:
        """How many pictures rows are drawn from: the same row of a shorter file is another picture."""
        with np.load(self.data, allow_pickle=False) as archive:
            return len(archive["y_test"])

    def pictures(self, rows: list[int]) -> Batch:
        """Return pictures of the test split, by place in one shuffled order."""
        with np.load(self.data, allow_pickle=False) as archive:
            inputs, labels = archive["x_test"], archive["y_test"]
        order = np.random.default_rng(self.seed).permutation(len(inputs))[rows]
        pictures = torch.from_numpy(inputs[order]).permute(0, 3, 1, 2).float() / 255
        return Batch(pictures.contiguous().to(self.device), torch.from_numpy(labels[order].astype(np.int64)).to(self.device))


def learner_of(scene: Scene, place: Place) -> Learner:
    """Return the learner of a scene; a trained LeNet is trained once and kept."""
    model = build_model(scene.model, input_shape=SHAPE, classes=CLASSES, seed=Seed(place.seed))
    if scene.trained:
        path = place.weights if scene.cut else str(_trained_lenet(model, place))
        load_weights(model, path)
    loss = loss_by_name("cross_entropy")
    if not scene.cut:
        return Learner.of(model, loss).to(place.device)
    return EmbeddingLearner.of_bottom(split_model(model, scene.cut)[0], loss).to(place.device)


def _trained_lenet(model: nn.Module, place: Place) -> Path:
    file = place.out / "lenet-trained.pt"
    if file.exists():
        return file
    with np.load(place.data, allow_pickle=False) as archive:
        parts = {name: archive[name] for name in ("x_train", "y_train", "x_test", "y_test")}
    inputs, tests = (torch.from_numpy(parts[n]).permute(0, 3, 1, 2).float() / 255 for n in ("x_train", "x_test"))
    labels, truth = (torch.from_numpy(parts[n].astype(np.int64)) for n in ("y_train", "y_test"))
    generator = torch.Generator().manual_seed(place.seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=RATE)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(inputs), generator=generator).split(BATCH):
            optimiser.zero_grad()
            F.cross_entropy(model(inputs[rows]), labels[rows]).backward()
            optimiser.step()
    with torch.no_grad():
        accuracy = float((model(tests).argmax(1) == truth).float().mean())
    # Several jobs may come here at once; all make the same file, and the last one wins.
    stored = io.BytesIO()
    torch.save(model.state_dict(), stored)
    write_whole(file, stored.getvalue())
    file.with_suffix(".txt").write_text(f"{accuracy:.4f}\n", encoding="utf-8")
    return file


def risks(name: str, place: Place, rows: list[int], dtype: torch.dtype = torch.float64) -> list[dict[str, Any]]:
    """Return, per picture, its exact risk by several measures, and what needs no model at all."""
    learner, batch, alpha = learner_of(SCENES[name], place), place.pictures(rows), built_in_calibration().alpha
    found = []
    for index, row in enumerate(rows):
        x = batch.inputs[index]
        measured = spectrum(gradient_jacobian(learner, x, batch.targets[index], dtype=dtype), mode="gram", seed=Seed(row))
        score = risk_score(measured, alpha=alpha)
        found.append(
            {
                "row": row,
                "invre": score.invre,
                "score": score.score,
                "relative": score.relative,
                "fil": float(measured.values[0]),
                "dfil": measured.frobenius / measured.inputs,
                "energy": measured.energy / measured.inputs,
                "variation": float(total_variation(x.unsqueeze(0))),
                "rank": score.rank,
                "outputs": measured.outputs,
                "seconds": measured.seconds,
                "disagreement": measured.disagreement,
            }
        )
    return found


def nulls(place: Place, rows: list[int]) -> list[dict[str, Any]]:
    """Return, per picture, the error of guesses that see nothing of it: grey, and the mean of the training pictures."""
    with np.load(place.data, allow_pickle=False) as archive:
        mean = torch.from_numpy(archive["x_train"].mean(0)).permute(2, 0, 1).float() / 255
    batch = place.pictures(rows)
    guesses = {"grey": torch.full(SHAPE, 0.5), "data mean": mean}
    errors = {
        name: mean_squared_error(guess.to(batch.inputs).expand_as(batch.inputs), batch.inputs).cpu()
        for name, guess in guesses.items()
    }
    return [{"row": row, **{name: float(error[index]) for name, error in errors.items()}} for index, row in enumerate(rows)]


def attack_by_name(name: str, scene: Scene, *, steps: int = 0, stance: str = "plain") -> Attack:
    """Return DLG (L-BFGS on squared differences) or IG (Adam on cosines with total variation), at one size of step throughout."""
    steps = steps or ITERATIONS[name][-1]
    if name == "dlg":
        return IDLG(steps=steps, stance=stance)
    return InvertingGradients(steps=steps, signed=False, schedule="constant", tv=TV, smooth_relu=scene.smooth, stance=stance)


def attacked(name: str, attack: str, place: Place, rows: list[int], steps: int = 0) -> list[dict[str, Any]]:
    """Attack what is shared about every picture, and return its error after several numbers of iterations."""
    scene = SCENES[name]
    learner, batch = learner_of(scene, place), place.pictures(rows)
    observations = [observe(learner, batch, i) for i in range(len(rows))]
    chosen = attack_by_name(attack, scene, steps=steps)
    wanted = ITERATIONS[attack]
    errors: dict[int, Tensor] = {}

    def watch(done: int, leaves: Named) -> None:
        if done in wanted:
            errors[done] = mean_squared_error(leaves["inputs"][:, 0].clamp(0, 1), batch.inputs).cpu()

    final = launch(chosen, observations, AttackContext(seed=Seed(place.seed), budget=10**9, watch=watch))
    last = mean_squared_error(torch.cat([each.inputs for each in final]), batch.inputs).cpu()
    return [
        {
            "row": row,
            # A run that has stopped early stays where it was.
            "mse": {str(count): float(errors.get(count, last)[index]) for count in wanted},
            "final": float(last[index]),
            "energy": float(batch.inputs[index].double().square().mean()),
        }
        for index, row in enumerate(rows)
    ]


def expected_error(mse: dict[str, float]) -> float:
    """Return E[MSE] = Σ P_t MSE_t with P_t ∝ 1 / T_t and T_t the sum of the first t iteration counts (Xu et al., Appendix C)."""
    counts = sorted(int(count) for count in mse)
    efforts = np.cumsum(counts)
    likely = (1 / efforts) / (1 / efforts).sum()
    return float(sum(share * mse[str(count)] for share, count in zip(likely, counts, strict=True)))


def observe(learner: Learner, batch: Batch, index: int, defense: Defense | None = None, seed: Seed | None = None) -> Observation:
    """Return what an attacker sees of one picture."""
    one = Batch(batch.inputs[index : index + 1], batch.targets[index : index + 1])
    defense = defense or NoDefense()
    if isinstance(learner, EmbeddingLearner):
        updates: tuple[Update, ...] = (Update(weights=learner.update(one.inputs, one.targets), examples=1),)
        adversary: Any = OpenAdversary()
        payloads: tuple[Any, ...] = ()
    else:
        result = run_client(learner, one, defense, seed or Seed(0))
        updates, payloads = (defense.decode(result.payload, ModelSpec.of(learner.model)),), (result.payload,)
        adversary = defense.adversary()
    return Observation((learner,), updates, payloads, SHAPE, CLASSES, 1, KNOWS, adversary, labels=one.targets)


def defended(spelling: str, place: Place, rows: list[int], steps: int) -> dict[str, Any]:
    """Return risk and the error of the informed attacker under one defense of LeNet's gradients."""
    scene = SCENES["lenet"]
    learner, batch, defense = learner_of(scene, place), place.pictures(rows), build_defense(spelling)
    alpha = built_in_calibration().alpha
    records: list[dict[str, Any]] = []
    notes: set[str] = set()
    for index, row in enumerate(rows):
        release = defended_release(learner, batch.inputs[index], batch.targets[index], defense, Seed(row))
        measured = _gradient_spectrum(release, row)
        on_data, on_shared = release.noise_on("data", measured), release.noise_on("shared", measured)
        scores = {
            form: risk_score(measured, alpha=alpha, noise_form=form, data_noise=on_data, shared_noise=on_shared)
            for form in ("paper", "inverse")
        }
        records.append({"row": row, "paper": scores["paper"].invre, "inverse": scores["inverse"].invre})
        notes |= {*release.notes, *measured.notes}
    observations = [observe(learner, batch, i, defense, Seed(row)) for i, row in enumerate(rows)]
    return {"defense": spelling, "notes": sorted(notes), "records": _hit(records, scene, observations, batch, place, steps)}


def _gradient_spectrum(release: DefendedRelease, row: int) -> Spectrum:
    """Return the exact spectrum of what the attacker compares; the undefended one serves all defenses that only add noise."""
    if not release.plain:
        return spectrum(release.jacobian, mode="gram", seed=Seed(row))
    if ("lenet", row) not in _kept_spectra:
        _kept_spectra["lenet", row] = spectrum(release.jacobian, mode="gram", seed=Seed(row))
    return _kept_spectra["lenet", row]


def _hit(
    records: list[dict[str, Any]], scene: Scene, observations: list[Observation], batch: Batch, place: Place, steps: int
) -> list[dict[str, Any]]:
    """Add the errors of both attacks, as the informed attacker runs them."""
    for name in ITERATIONS:
        found = launch(
            attack_by_name(name, scene, steps=steps, stance="informed"),
            observations,
            AttackContext(seed=Seed(place.seed), budget=10**9),
        )
        errors = mean_squared_error(torch.cat([each.inputs for each in found]), batch.inputs).cpu()
        for record, error in zip(records, errors.tolist(), strict=True):
            record[name] = error
    return records


def defended_embedding(name: str, kind: str, strength: float, place: Place, rows: list[int], steps: int) -> dict[str, Any]:
    """Return risk and error under noise on an embedding, or where entries of it are pruned or dropped.

    The attacker knows the law of the noise and sees which entries are zero. Noise enters the score by Theorem 3.
    """
    scene = SCENES[name]
    learner, batch, alpha = learner_of(scene, place), place.pictures(rows), built_in_calibration().alpha
    assert isinstance(learner, EmbeddingLearner)
    precise = learner.to(torch.float64)
    records: list[dict[str, Any]] = []
    observations = []
    for index, row in enumerate(rows):
        seen = observe(learner, batch, index)
        value = seen.update.weights[EMBEDDING]
        generator = Seed(row).generator("embedding")
        noise, mask = torch.randn(value.shape, generator=generator).to(value), torch.ones_like(value)
        if kind == "noise":
            value = value + strength * noise
        elif kind == "pruning":
            floor = value.abs().flatten().kthvalue(max(1, math.ceil(strength * value.numel()))).values
            mask = (value.abs() > floor).to(value)
        else:
            mask = (torch.rand(value.shape, generator=generator).to(value) >= strength).to(value)
        adversary = OpenAdversary() if kind == "noise" else ZeroedEntriesAdversary()
        update = Update(weights={EMBEDDING: value * mask}, examples=1)
        observations.append(seen.replace(updates=(update,), adversary=adversary))
        std = strength if kind == "noise" else 0.0
        measured = _embedding_spectrum(name, precise, batch.inputs[index], mask, row)
        scores = {form: risk_score(measured, alpha=alpha, noise_form=form, shared_noise=std) for form in ("paper", "inverse")}
        records.append({"row": row, "paper": scores["paper"].invre, "inverse": scores["inverse"].invre})
    return {
        "defense": f"embedding {kind} {strength:g}",
        "notes": [],
        "records": _hit(records, scene, observations, batch, place, steps),
    }


_kept_spectra: dict[tuple[str, int], Spectrum] = {}
"""Of what is sent without a defense, by scene and row: those of all strengths of noise are one."""


def _embedding_spectrum(name: str, learner: EmbeddingLearner, x: Tensor, mask: Tensor, row: int) -> Spectrum:
    """Return the exact spectrum of the entries that are sent; few entries make a matrix with few rows, which is quick."""
    whole = bool(mask.all())
    if whole and (name, row) in _kept_spectra:
        return _kept_spectra[name, row]
    sent = mask.flatten().nonzero().flatten()
    jacobian = jacobian_of(lambda point: learner.embed(point.unsqueeze(0)).flatten()[sent], x)
    mode = "dense" if len(sent) * x.numel() <= DENSE_ENTRIES else "gram"
    found = spectrum(jacobian, mode=mode, seed=Seed(row))
    if whole:
        _kept_spectra[name, row] = found
    return found
