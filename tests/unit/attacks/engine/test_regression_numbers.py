"""Every number that a regression, a sketch, a public batch and a model of rows are made of, beside one computed by hand."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from gradveil.attacks.base import PublicRecords
from gradveil.attacks.engine import affordable, label_rows, public_batches, regression, sketches
from gradveil.randomness import Seed
from tests.unit.attacks.scenes import CLASSES, drawn, public

MLP = "mlp(hidden=2, activation='sigmoid')"


@pytest.mark.parametrize("uneven", [False, True])
def test_every_field_of_a_fit_is_what_it_says(uneven: bool) -> None:
    features, outputs = drawn(13, 9, seed=1), drawn(13, 2, seed=2)
    features[:, 5:] *= 40 * drawn(4, seed=3)
    outputs += features[:, :2] + 0.3 * features[:, 5:7]
    folds = torch.tensor([0, 1, 2, 0, 0, 0, 0, 1, 0, 2, 0, 0, 1]) if uneven else torch.arange(13) % 4
    parts = [slice(0, 5), slice(5, 9)]
    fit = regression.fit_regression(features.float(), outputs, folds, parts)
    x = features.float().double()
    assert torch.allclose(fit.mean, outputs.mean(0)) and torch.allclose(fit.centre, x.mean(0))
    variance = x.var(0, correction=0)
    energy = torch.cat([variance[part].sum().expand(part.stop - part.start) for part in parts])
    typical = torch.cat([variance[part].mean().expand(part.stop - part.start) for part in parts])
    scales = {"values": torch.ones(9).double(), "tensors": energy.rsqrt(), "entries": (variance + 1e-4 * typical).rsqrt()}
    best: tuple[float, str, float] = (float("inf"), "", 0.0)
    for name, scale in scales.items():
        rows = (x - x.mean(0)) * scale
        unit = float(rows.square().sum()) / 12
        for strength in regression.STRENGTHS:
            wrong = 0.0
            for fold in folds.unique():
                held, kept = folds == fold, folds != fold
                own, other = rows[kept] - rows[kept].mean(0), outputs[kept] - outputs[kept].mean(0)
                solved = torch.linalg.solve(own @ own.T + strength * unit * torch.eye(len(own)), other)
                guess = (rows[held] - rows[kept].mean(0)) @ own.T @ solved + outputs[kept].mean(0)
                wrong += float((guess - outputs[held]).square().sum()) / 26
            best = min(best, (wrong, name, strength))
    assert (fit.weighing, fit.strength) == best[1:] and fit.error == pytest.approx(best[0], rel=1e-4)
    of_mean = [(outputs[folds == f] - outputs[folds != f].mean(0)).square().sum() for f in folds.unique()]
    assert fit.spread == pytest.approx(float(torch.stack(of_mean).sum()) / 26)
    rows = (x - x.mean(0)) * scales[fit.weighing]
    assert torch.allclose(fit.scale, scales[fit.weighing]) and fit.examples.dtype == torch.float32
    assert torch.allclose(fit.examples.double(), rows, rtol=1e-6, atol=1e-6)
    ridge = fit.strength * float(rows.square().sum()) / 12
    assert torch.allclose(fit.dual, torch.linalg.solve(rows @ rows.T + ridge * torch.eye(13), outputs - outputs.mean(0)))
    assert fit.entries == 13 * 9 + 13 * 2
    fresh = drawn(3, 9, seed=4)
    answer = outputs.mean(0) + ((fresh - x.mean(0)) * fit.scale) @ fit.examples.double().T @ fit.dual
    assert torch.allclose(fit.predict(fresh), answer)


def test_two_folds_are_enough_and_columns_come_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    features, folds = drawn(9, 7), torch.arange(9) % 2
    outputs = features[:, :3] + features[:, 4:]
    whole = regression.fit_regression(features, outputs, folds, [slice(0, 7)])
    monkeypatch.setattr(regression, "COLUMNS", 3)
    blocks = regression.fit_regression(features, outputs, folds, [slice(0, 7)])
    for name in ("mean", "centre", "scale", "examples", "dual"):
        assert torch.allclose(getattr(blocks, name), getattr(whole, name))
    assert torch.allclose(blocks.predict(features + 1), whole.predict(features + 1))


def test_a_sketch_is_sums_of_signed_rows_and_hangs_on_its_seed_alone() -> None:
    many = {"large": drawn(3, 5, 5), "small": drawn(3, 2, seed=1), "wide": drawn(3, 11, seed=2)}
    one = {name: value[0] for name, value in many.items()}
    sketcher = sketches.Sketcher.of(one, 14, 6)
    assert dict(sketcher.widths) == {"large": 6, "small": 2, "wide": 6} and set(sketcher.signs) == {"large", "wide"}
    assert sketcher.parts == [slice(0, 6), slice(6, 8), slice(8, 14)]
    generator = torch.Generator().manual_seed(6)
    rows = sketcher.rows(many)
    for name, part in zip(many, sketcher.parts, strict=True):
        flat = many[name].flatten(1)
        if name == "small":
            assert torch.equal(rows[:, part], flat)
            continue
        signs = 2 * torch.randint(2, (flat.shape[1],), generator=generator, dtype=torch.int8) - 1
        assert torch.equal(sketcher.signs[name], signs)
        sums = torch.zeros(3, 6, dtype=torch.float64)
        for place in range(flat.shape[1]):
            sums[:, place % 6] += flat[:, place] * signs[place]
        assert torch.allclose(rows[:, part], sums)
    assert torch.equal(sketches.Sketcher.of(one, 14, 6).rows(many), rows)
    assert not torch.equal(sketches.Sketcher.of(one, 14).rows(many), rows)
    assert sketches.Sketcher.of(one).widths == {"large": 25, "small": 2, "wide": 11}, "an update that is small stays whole"
    assert sketches.shares({"a": 3, "b": 9, "c": 1}, 2) == {"a": 1, "b": 1, "c": 1}, "no tensor goes without a number"


def row_of(records: PublicRecords, picture: Tensor) -> int:
    (row,) = (records.inputs == picture).flatten(1).all(1).nonzero().flatten().tolist()
    return int(row)


@pytest.mark.parametrize("labels", [None, [2]])
def test_single_records_come_in_the_order_of_the_seed_with_folds_in_turn(labels: list[int] | None) -> None:
    records, told = public(30), None if labels is None else torch.tensor(labels)
    found = public_batches.public_batches(records, told, 1, 11, Seed(4))
    order = Seed(4).numpy("public batches").permutation(30).tolist()
    if labels is not None:
        order = [row for row in order if row % CLASSES == 2] + [row for row in order if row % CLASSES != 2]
    assert [row_of(records, each[0]) for each in found.inputs] == order[:11]
    expected = [[row % CLASSES] for row in order[:11]] if labels is None else [[2]] * 11
    assert found.targets.tolist() == expected and found.folds.tolist() == [place % 4 for place in range(11)]


@pytest.mark.parametrize("pool", [1, 16])
def test_batches_are_drawn_from_the_records_of_their_fold_their_own_label_first(
    pool: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(public_batches, "POOL", pool)
    records, labels = public(100), torch.tensor([1, 1, 4])
    found = public_batches.public_batches(records, labels, 3, 60, Seed(4))
    generator = Seed(4).numpy("public batches")
    order = generator.permutation(100)
    assert found.folds.tolist() == [place % 4 for place in range(60)] and found.targets.tolist() == [[1, 1, 4]] * 60
    for place, batch in enumerate(found.inputs):
        mine, rows = order[place % 4 :: 4].tolist(), list[int]()
        for label in labels.tolist():
            own = sum(row % CLASSES == label for row in mine)
            allowed = sorted(mine, key=lambda row: row % CLASSES != label)[: max(own, pool, 6)]
            free = [row for row in allowed if row not in rows]
            rows.append(free[int(generator.integers(len(free)))])
        assert [row_of(records, picture) for picture in batch] == rows
    again = public_batches.public_batches(records, labels, 3, 60, Seed(4))
    assert torch.equal(again.inputs, found.inputs)


def test_two_of_a_batch_with_one_label_are_ordered_and_others_stay() -> None:
    pictures = torch.tensor([[0.9, 0.1, 0.5], [0.2, 0.8, 0.1], [0.3, 0.7, 0.4]])[..., None].expand(3, 3, 4).double()
    found = public_batches.by_brightness(pictures, torch.tensor([3, 0, 3]))[..., 0]
    assert torch.allclose(found, torch.tensor([[0.5, 0.1, 0.9], [0.1, 0.8, 0.2], [0.3, 0.7, 0.4]]).double(), atol=1e-6)


@pytest.mark.parametrize(("clock", "worked"), [(5.0, 3.0), (2.0, 9.0)])
def test_a_run_takes_what_its_second_one_does(clock: float, worked: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now, told = [100.0, 50.0], list[int]()

    def run(place: int) -> None:
        told.append(place)
        now[0], now[1] = now[0] + (1000, clock)[place], now[1] + (1000, worked)[place]

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "process_time", lambda: now[1])
    assert affordable.seconds_of(run) == min(clock, worked) and told == [0, 1]


def test_sizes_are_halved_only_as_long_as_they_take_too_long() -> None:
    assert affordable.halved(64, 16, 2.0, 128.0) == 64
    assert affordable.halved(64, 16, 2.0, 127.0) == 32
    assert affordable.halved(40, 16, 2.0, 1.0) == 16 and affordable.halved(16, 16, 2.0, 1.0) == 16


def scores_of(features: Tensor, labels: Tensor, *, kept: Tensor) -> Tensor:
    """Return (N, C) scores of all releases by what those kept teach, found by a general optimiser."""
    usual = torch.stack([features[kept & (labels != label)][:, label].mean(0) for label in range(features.shape[1])])
    weights = torch.zeros(features.shape[2], dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS([weights], max_iter=200, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        search.zero_grad()
        scores = (features[kept] - usual) @ weights
        value = torch.nn.functional.cross_entropy(scores, labels[kept], reduction="sum") + weights.square().sum() / 2
        value.backward()
        return value

    search.step(loss)
    return ((features - usual) @ weights).detach()


def test_rows_are_scored_less_their_usual_look_at_the_temperature_of_what_is_left_out() -> None:
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(3, (14,), generator=generator)
    features = torch.randn((14, 3, 4), generator=generator, dtype=torch.float64)
    features[torch.arange(14), labels] += torch.tensor([0.4, 0, -0.3, 0])
    features[:, 1] += 5
    folds = [0, 1, 2, 3, 0, 1, 2, 3, 0, 0, 0, 2, 1, 3]
    everybody = torch.ones(14, dtype=torch.bool)
    fit = label_rows.fit_rows(features, labels, folds)
    scores = scores_of(features, labels, kept=everybody)
    assert torch.allclose((features - fit.usual) @ fit.weights, scores, atol=1e-5)
    odd = torch.tensor(folds) % 2 == 1
    apart = torch.where(odd[:, None], scores_of(features, labels, kept=~odd), scores_of(features, labels, kept=odd))
    losses = {t: float(torch.nn.functional.cross_entropy(t * apart, labels)) for t in (*label_rows.TEMPERATURES, 1.0)}
    assert fit.temperature == min(losses, key=lambda t: losses[t]) < 1
    assert torch.allclose(fit.log_posterior(features[2]), (fit.temperature * scores[2]).log_softmax(0), atol=1e-5)
    assert label_rows.fit_rows(features, labels, [0] * 14).temperature == 1.0, "nothing is left out of one picture"


def test_counts_are_fitted_to_all_and_their_spread_is_that_of_what_is_left_out() -> None:
    features, counts = drawn(5, 3, 2), drawn(5, 3, seed=1).mul(4).floor()
    coefficients, spread = label_rows.fit_counts(features, counts)

    def fitted(x: Tensor, y: Tensor) -> Tensor:
        """Solve least squares with one more row for every coefficient, which draws it to zero."""
        rows = torch.cat([x.reshape(-1, 2), torch.ones(len(x) * 3, 1)], 1)
        target = torch.cat([y.reshape(-1), torch.zeros(3)])[:, None]
        solved: Tensor = torch.linalg.lstsq(torch.cat([rows, torch.eye(3)]), target).solution[:, 0]
        return solved

    assert torch.allclose(coefficients, fitted(features, counts))
    wrong = []
    for release in range(5):
        others = [other for other in range(5) if other % 2 != release % 2]
        own = fitted(features[others], counts[others])
        wrong.append(features[release] @ own[:2] + own[2] - counts[release])
    assert spread == pytest.approx(float(torch.cat(wrong).square().mean().sqrt()))


def test_values_are_standardised_over_classes_alone() -> None:
    values = drawn(2, 3, 4)
    found = label_rows.standardised(values)
    for i in range(2):
        for j in range(3):
            own = values[i, j]
            assert torch.allclose(found[i, j], (own - own.mean()) / own.std(correction=0))
    assert not label_rows.standardised(torch.full((2, 5), 3.0)).any()
    wild = label_rows.standardised(torch.tensor([float("nan"), float("inf"), 0.0]))
    assert torch.allclose(wild, torch.tensor([-1.0, 2.0, -1.0]).double() / 2**0.5)


@pytest.mark.parametrize("biased", [True, False])
def test_every_feature_of_a_row_is_what_it_says(biased: bool) -> None:
    weight, direction, prediction = drawn(4, 3) - 0.5, drawn(3, seed=1) - 0.5, drawn(4, seed=2).softmax(0)
    weight[1, 0] = 0
    bias = torch.tensor([0.3, 0.0, -0.2, 0.1]).double()
    found = label_rows.features_of_rows(weight, bias if biased else None, direction, prediction)
    rows = []
    size = float(bias.square().sum().sqrt()) if biased else 0.0
    for own, row in zip(bias.tolist() if biased else [0.0] * 4, weight, strict=True):
        along, across = float(row @ direction), float((bias * prediction).sum()) if biased else 0.0
        angle = torch.tensor(abs(own - across) + 1e-7 * size + 2.2250738585072014e-308).double().log()
        norm, silent = float(row.square().sum().sqrt()), float((row == 0).sum()) / 3
        rows.append([own, float(row.sum()), along, abs(own), norm, abs(along), float(own == 0), silent, float(angle)])
    columns = torch.tensor(rows).double()
    expected = torch.stack([label_rows.standardised(column) for column in columns.T], 1)
    assert found.shape == (4, 9) and torch.allclose(found, expected)
