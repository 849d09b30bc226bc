"""Spectra of several records in one program are those of one record at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gradveil.defenses import build_defense
from gradveil.errors import NeverSupported
from gradveil.learning import EmbeddingLearner, Learner, loss_by_name
from gradveil.models import build_model, split_model
from gradveil.models.resnet import ResNet
from gradveil.randomness import Seed
from gradveil.records import Batch
from gradveil.risk.defended import Releases
from gradveil.risk.exposure import assess
from gradveil.risk.invre import risk_score
from gradveil.spectra import lanczos
from gradveil.spectra import spectrum as module
from gradveil.spectra.jacobians import Jacobian, Law, gradient_jacobian, gradient_jacobians, jacobian_of
from gradveil.spectra.spectrum import Spectrum, records_at_once, spectra_of, spectrum
from gradveil.study.codec import encode
from gradveil.study.local_training import TrainingSettings

SHAPE = (1, 6, 6)
INPUTS = torch.rand((3, *SHAPE), generator=Seed(1).generator("inputs"))
TARGETS = torch.tensor([0, 3, 2])
SEEDS = [Seed(0).child("risk", index) for index in range(3)]
KINDS = ("gradient", "resnet", "pruned", "update", "embedding", "late embedding")


def records(kind: str) -> list[Jacobian]:
    loss = loss_by_name("cross_entropy")
    model = build_model("lenet(activation='relu')", input_shape=SHAPE, classes=4, seed=Seed(0))
    if kind.endswith("embedding"):
        bottom = split_model(model, "cut1" if kind == "embedding" else "cut3")[0]
        return gradient_jacobians(EmbeddingLearner.of_bottom(bottom, loss), INPUTS, TARGETS)
    if kind == "resnet":
        model = ResNet(SHAPE, 4, (2, 3), 1, norm="batch", activation="relu", shortcut="projection", normalize=None).eval()
        generator = torch.Generator().manual_seed(4)
        for value in model.parameters():
            nn.init.normal_(value, std=0.5, generator=generator)
    steps = TrainingSettings(shares="weights", local_steps=2, learning_rate=0.5) if kind == "update" else None
    learner = Learner.of(model, loss, steps)
    if kind in ("pruned", "sparse"):
        releases = Releases(learner, build_defense("pruning(rate=0.9)"))
        parts = zip(INPUTS, TARGETS, SEEDS, strict=True)
        made = [releases.of(x, y, seed, torch.float64).jacobian for x, y, seed in parts]
        # With little room rows are taken a few at a time, and those that were pruned are skipped, others of each record.
        return [replace(each, working_bytes=2**20) for each in made] if kind == "sparse" else made
    return gradient_jacobians(learner, INPUTS, TARGETS)


def check_same(one: Spectrum, many: Spectrum, exact: float = 1e-9) -> None:
    top = float(one.values[0])
    assert (one.mode, one.inputs, one.outputs, one.notes) == (many.mode, many.inputs, many.outputs, many.notes)
    assert one.values.shape == many.values.shape and one.energy == many.energy
    # Of a Gram matrix, singular values below the root of rounding are noise.
    assert torch.allclose(one.values.square(), many.values.square(), rtol=0, atol=exact * max(top**2, 1e-300))
    assert many.frobenius == pytest.approx(one.frobenius, rel=exact)
    assert torch.isfinite(many.projections).all()
    scores = [risk_score(each, alpha=0.95) for each in (one, many)]
    for name in ("score", "low", "high"):  # the tail's estimate included
        assert getattr(scores[0], name) == pytest.approx(getattr(scores[1], name), abs=1e-7)
    if one.tail_values is None or many.tail_values is None:
        assert one.tail_values is many.tail_values
        return
    # Ritz vectors of the null space are any; ranks of the others are not.
    real = one.tail_values > 1e-5 * top
    for name in ("tail_ranks", "tail_energy", "tail_values"):
        assert torch.allclose(getattr(one, name)[real], getattr(many, name)[real], rtol=1e-5, atol=1e-7), name


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many records each program took."""
    taken: list[int] = []
    measured = module._measured

    def counted(jacobians: Sequence[Jacobian], *rest: Any) -> list[Spectrum]:
        taken.append(len(jacobians))
        return measured(jacobians, *rest)

    monkeypatch.setattr(module, "_measured", counted)
    return taken


CASES = [(kind, mode) for kind in KINDS for mode in ("dense", "gram", "leading")]


@pytest.mark.parametrize(("kind", "mode"), [*CASES, ("sparse", "gram"), ("by layers", "leading")])
def test_many_are_as_one_by_one(kind: str, mode: str, programs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "by layers":
        monkeypatch.setattr(lanczos, "BY_LAYERS", 0)
    made = records("resnet" if kind == "by layers" else kind)
    alone = [spectrum(each, mode=mode, seed=seed, leading=24) for each, seed in zip(made, SEEDS, strict=True)]
    programs.clear()
    together = spectra_of(made, mode=mode, seeds=SEEDS, leading=24, together=True)
    assert programs == [len(made)], "one program for all of them, and no return to one by one"
    for one, many in zip(alone, together, strict=True):
        check_same(one, many)
        assert many.seconds == pytest.approx(together[0].seconds, rel=0.1) and many.seconds > 0


@pytest.mark.parametrize("mode", ["dense", "gram", "leading"])
def test_vectors_are_those_of_their_record(mode: str) -> None:
    found = spectra_of(records("gradient"), mode=mode, right=True, left=True, leading=8, together=True)
    for jacobian, each in zip(records("gradient"), found, strict=True):
        assert each.right is not None and each.left is not None
        pushed = jacobian.push(each.right[:, :4].T).T
        assert torch.allclose(pushed, each.left[:, :4] * each.values[:4], atol=1e-9 * float(each.values[0]))
        assert torch.allclose(each.projections, each.right.T @ jacobian.at.reshape(-1), atol=1e-8)


def gates(rows: Tensor) -> list[Jacobian]:
    """Records of one function whose singular values are the rows: J = diag(row), a row of zeros is a dead record."""
    law = Law(lambda x, own: own[0]["gate"] * x)
    x = torch.linspace(0.1, 0.9, rows.shape[1], dtype=torch.float64)
    return [law.jacobian(x, ({"gate": row},)) for row in rows]


def uneven() -> Tensor:
    """A live record, a dead one, one with values repeated more often than a block is wide, and one of rank two."""
    rows = torch.zeros((4, 44), dtype=torch.float64)
    rows[0] = torch.linspace(2.0, 0.01, 44)
    rows[2, :40], rows[2, 40:] = 2.0, 1.0
    rows[3, :2] = torch.tensor([3.0, 1.0])
    return rows


@pytest.mark.parametrize("mode", ["dense", "gram", "leading"])
def test_a_dead_record_and_repeated_values_stand_beside_live_ones(mode: str, programs: list[int]) -> None:
    made = gates(uneven())
    found = spectra_of(made, mode=mode, together=True)
    assert programs == [4]
    for row, jacobian, each in zip(uneven(), made, found, strict=True):
        exact = row.sort(descending=True).values[: len(each.values)]
        assert torch.allclose(each.values, exact, atol=1e-7)
        check_same(spectrum(jacobian, mode=mode), each)
    assert [each.dead for each in found] == [False, True, False, False]
    assert "Jacobian is zero" in found[1].notes[-1] and found[0].notes == ()


def test_a_record_that_is_done_early_is_blanked_and_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steep spectra converge at once, flat ones after many rounds; rounds of the others leave a finished record as it is."""
    running: list[list[bool]] = []
    step = lanczos._Run._step

    def seen(run: lanczos._Run) -> bool:
        running.append(list(run._running))
        return step(run)

    monkeypatch.setattr(lanczos._Run, "_step", seen)
    size = 300
    steep, flat = 0.7 ** torch.arange(size, dtype=torch.float64), torch.linspace(1.0, 0.98, size, dtype=torch.float64)
    made = gates(torch.stack([steep, flat]))
    found = spectra_of(made, mode="leading", leading=4, together=True)
    assert [False, True] in running
    for jacobian, each in zip(made, found, strict=True):
        check_same(spectrum(jacobian, mode="leading", leading=4), each)


def test_as_many_go_together_as_memory_allows(programs: list[int]) -> None:
    for kind, mode in (("gradient", "gram"), ("embedding", "leading"), ("pruned", "dense")):
        made = records(kind)
        most = 2**10
        while records_at_once(made[0], mode, together=True, most_bytes=most) < 2:
            most = most * 5 // 4
        fitting = records_at_once(made[0], mode, together=True, most_bytes=most)
        assert 2 <= fitting < len(made)
        whole = spectra_of(made, mode=mode, together=True)
        programs.clear()
        for one, many in zip(whole, spectra_of(made, mode=mode, together=True, most_bytes=most), strict=True):
            check_same(one, many)
        assert max(programs) == fitting and sum(programs) == len(made)
        assert records_at_once(made[0], mode, together=True, most_bytes=1) == 1
        assert records_at_once(made[0], mode) == 1, "on a CPU one by one is as fast"


def test_too_little_memory_halves_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, sizes = module._measured, []

    def greedy(jacobians: Sequence[Jacobian], *rest: Any) -> list[Spectrum]:
        sizes.append(len(jacobians))
        if len(jacobians) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return measured(jacobians, *rest)

    monkeypatch.setattr(module, "_measured", greedy)
    found = spectra_of(gates(uneven()), mode="dense", together=True)
    assert sizes == [4, 2, 2] and float(found[3].values[0]) == pytest.approx(3.0)


ORDERED = gates(uneven())
ALONE = [spectrum(each, mode="leading", leading=6) for each in ORDERED]


@settings(max_examples=15, deadline=None)
@given(order=st.permutations(range(4)), kept=st.integers(1, 4))
def test_the_order_and_the_company_of_a_record_do_not_matter(order: list[int], kept: int) -> None:
    chosen = order[:kept]
    found = spectra_of([ORDERED[index] for index in chosen], mode="leading", leading=6, together=True)
    for index, each in zip(chosen, found, strict=True):
        check_same(ALONE[index], each)


def test_records_of_different_functions_and_shapes_are_kept_apart(programs: list[int]) -> None:
    own = gates(uneven())
    others = [jacobian_of(lambda x: 2 * x, own[0].at), jacobian_of(lambda x: 3 * x, own[0].at)]

    def share(x: Tensor) -> Tensor:
        return 5 * x

    alike = [jacobian_of(share, torch.ones(44) * value) for value in (0.1, 0.2)]
    found = spectra_of([own[0], others[0], alike[0], own[2], others[1], alike[1]], mode="dense", together=True)
    assert [round(float(each.values[0]), 6) for each in found] == [2, 2, 5, 2, 3, 5]
    assert sorted(programs) == [1, 1, 2, 2]


def test_what_cannot_be_mapped_goes_one_by_one(programs: list[int]) -> None:
    def share(x: Tensor) -> Tensor:
        return (2 if float(x.detach().sum()) > 1 else 3) * x.square()  # whoever decides by a value cannot be mapped

    made = [jacobian_of(share, torch.full((4,), value)) for value in (0.5, 0.1)]
    found = spectra_of(made, mode="dense", together=True)
    assert programs == [2, 1, 1]
    assert [float(each.values[0]) for each in found] == [pytest.approx(2.0), pytest.approx(0.6)]


def test_a_bad_record_is_named_by_the_same_error_as_alone() -> None:
    def share(x: Tensor) -> Tensor:
        return x.sqrt()

    made = [jacobian_of(share, torch.full((4,), value)) for value in (0.5, 0.0)]
    with pytest.raises(NeverSupported, match="not finite"):
        spectra_of(made, mode="dense", together=True)


def test_scores_of_a_batch_are_the_same_together(monkeypatch: pytest.MonkeyPatch, programs: list[int]) -> None:
    model = build_model("mlp(hidden=[8])", input_shape=SHAPE, classes=4, seed=Seed(0))
    learner = Learner.of(model, loss_by_name("cross_entropy"))
    inputs = INPUTS.clone()
    inputs[1], inputs[2] = 0.0, 0.5  # a black and a constant picture
    batch = Batch(inputs, TARGETS)
    for spelling in ("gaussian_noise(std=0.1)", "pruning(rate=0.5)", "svdefense", "invl_dnp"):
        for mode in ("gram", "leading"):
            told: list[int] = []
            alone = assess(learner, batch, build_defense(spelling), alpha=0.95, mode=mode, rows=[3, 1, 9])
            with monkeypatch.context() as on_a_gpu:
                on_a_gpu.setattr(module, "ONE_BY_ONE", ())
                programs.clear()
                together = assess(
                    learner, batch, build_defense(spelling), alpha=0.95, mode=mode, rows=[3, 1, 9], progress=told.append
                )
                assert max(programs) > 1, spelling
            assert told == [1, 2, 3]
            for one, many in zip(alone.records, together.records, strict=True):
                assert (one.row, one.label, one.mode, one.notes) == (many.row, many.label, many.mode, many.notes)
                assert many.invre == pytest.approx(one.invre, abs=1e-5), (spelling, mode)
                assert encode(one).keys() == encode(many).keys()


def test_one_record_functions_are_the_many_of_one() -> None:
    model = build_model("mlp", input_shape=(1, 4, 4), classes=3, seed=Seed(0))
    learner = Learner.of(model, loss_by_name("cross_entropy"))
    x = torch.rand((2, 1, 4, 4), generator=Seed(2).generator("x"))
    pair = gradient_jacobians(learner, x, torch.tensor([0, 2]))
    one = gradient_jacobian(learner, x[1], torch.tensor(2))
    assert torch.equal(pair[1].shared, one.shared) and not torch.equal(pair[0].shared, one.shared)
    assert spectra_of([]) == []
