from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradveil.errors import Unreliable, UsageError
from gradveil.randomness import Seed
from gradveil.risk.fisher import diagonal_leakage, fisher_leakage
from gradveil.risk.invloss import RankVariances, inversion_loss
from gradveil.risk.invre import GAP_RULES, invre, rank_weights, risk_score
from gradveil.spectra.jacobians import jacobian_of
from gradveil.spectra.spectrum import Spectrum, spectrum


def made(values: list[float], projections: list[float], *, outside: float = 0.0, outputs: int = 100) -> Spectrum:
    """A spectrum by hand; ``outside`` is the part of the record's energy that no singular vector sees."""
    sigma, along = torch.tensor(values, dtype=torch.float64), torch.tensor(projections, dtype=torch.float64)
    inputs = len(values) + (outside > 0)
    return Spectrum(
        values=sigma,
        projections=along,
        inputs=inputs,
        outputs=len(values) if outside else outputs,
        energy=float(along.square().sum()) + outside,
        frobenius=float(sigma.square().sum()),
        mode="dense",
    )


def test_the_formula_by_hand() -> None:
    # σ = 4, 2, 1: ratios 2, 2, 1 (σ_4 = 0); T = 2, 4, 5; 1/T = .5, .25, .2; τ = .5, .25, 0 of ‖x‖² = 4 with x = (√2, 1, 1)
    weights = rank_weights(torch.tensor([4.0, 2.0, 1.0]))
    assert weights.effort.tolist() == [2.0, 4.0, 5.0]
    assert weights.likelihood.tolist() == pytest.approx([0.5 / 0.95, 0.25 / 0.95, 0.2 / 0.95])
    score = risk_score(made([4.0, 2.0, 1.0], [math.sqrt(2), 1.0, 1.0]), alpha=0.3)
    expected = (0.5 * 0.5 + 0.25 * 0.25) / 0.95
    assert score.score == pytest.approx(expected)
    assert score.invre == pytest.approx(1 / (1 + math.exp(5 * (expected - 0.3))))
    assert score.relative == pytest.approx(1 / expected)
    assert score.low == score.high == score.invre


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 1e-9, 1e-5, 0.1, 0.10001, 0.5, 1.0, 1.0000001, 3.0, 1e6]), min_size=1, max_size=12),
    st.sampled_from(["merge", "clamp"]),
)
def test_duplicate_and_zero_values_are_finite_and_weights_sum_to_one(values: list[float], rule: str) -> None:
    sigma = sorted(values, reverse=True)
    weights = rank_weights(torch.tensor(sigma, dtype=torch.float64), gap_rule=rule)
    if sigma[0] == 0:
        assert weights.rank == 0
    else:
        assert float(weights.likelihood.sum()) == pytest.approx(1.0)
        assert bool((weights.likelihood.diff() <= 0).all()), "a higher rank is never likelier"
    score = risk_score(made(sigma, [0.3] * len(sigma)), alpha=0.5, gap_rule=rule)
    assert all(math.isfinite(each) for each in (score.invre, score.score, score.low, score.high))
    assert 0 <= score.invre <= 1


def test_merged_values_count_once_and_nobody_stops_between_them() -> None:
    tied, single = rank_weights(torch.tensor([4.0, 4.0, 2.0, 1.0])), rank_weights(torch.tensor([4.0, 2.0, 1.0]))
    assert tied.ranks.tolist() == [2, 3, 4] and tied.merged == 1
    assert torch.allclose(tied.likelihood, single.likelihood)
    clamped = rank_weights(torch.tensor([4.0, 4.0, 2.0, 1.0]), gap_rule="clamp")
    assert float(clamped.likelihood[0]) == pytest.approx(0.25, abs=1e-3), "one tie at the top makes all ranks equally hard"


def test_a_tie_at_the_top_ends_the_strict_rule() -> None:
    with pytest.raises(Unreliable, match="merge"):
        rank_weights(torch.tensor([2.0, 2.0, 1.0]), gap_rule="strict")
    later = rank_weights(torch.tensor([4.0, 2.0, 2.0]), gap_rule="strict")
    assert later.likelihood.tolist() == [1.0, 0.0, 0.0]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.0, 3.0), st.floats(0.0, 3.0))
def test_more_noise_never_raises_the_risk(number: int, weak: float, more: float) -> None:
    generator = Seed(number).generator("spectrum")
    sigma = torch.rand(8, generator=generator).sort(descending=True).values.tolist()
    along = torch.randn(8, generator=generator).tolist()
    base = made(sigma, along)
    for name in ("data_noise", "shared_noise"):
        lower = risk_score(base, alpha=0.5, **{name: weak})  # type: ignore[arg-type]
        higher = risk_score(base, alpha=0.5, **{name: weak + more})  # type: ignore[arg-type]
        assert higher.score >= lower.score and higher.invre <= lower.invre


def test_rank_zero_leaves_the_whole_record_also_where_outputs_are_few() -> None:
    few = made([2.0, 1.0], [1.0, 1.0], outside=2.0)
    assert inversion_loss(few).signal.tolist() == pytest.approx([1.0, 0.75, 0.5])
    assert inversion_loss(few, residual="paper").signal.tolist() == pytest.approx([0.5, 0.25, 0.0])


def test_noise_terms_are_the_theorems() -> None:
    spectra = made([2.0, 1.0], [1.0, 1.0], outputs=10)
    data = inversion_loss(spectra, data_noise=0.5)
    assert data.noise.tolist() == pytest.approx([0.0, 0.25 / 2 / 2, 0.5 / 2 / 2])  # over m = 2, and over ‖x‖² = 2
    shared = inversion_loss(spectra, shared_noise=0.5)
    assert shared.noise.tolist() == pytest.approx([0.0, 0.25 / 4 / 10 / 2, (0.25 / 4 + 0.25) / 10 / 2])
    assert shared.noise_total.tolist() == pytest.approx((shared.noise * 10).tolist())


def test_bounds_hold_for_a_linear_attacker_with_known_noise() -> None:
    generator = Seed(4).generator("matrix")
    G = torch.randn((12, 6), generator=generator, dtype=torch.float64)
    x = torch.rand(6, generator=generator, dtype=torch.float64)
    found = spectrum(jacobian_of(lambda point: G @ point, x), mode="dense", right=True, left=True)
    assert found.right is not None and found.left is not None
    noise = 0.1 * torch.randn(12, generator=generator, dtype=torch.float64)
    loss = inversion_loss(found, shared_noise=noise)
    for k in range(7):
        inverse = found.right[:, :k] @ torch.diag(1 / found.values[:k]) @ found.left[:, :k].T
        clean, noisy = inverse @ G @ x - x, inverse @ noise
        assert float(loss.signal[k]) == pytest.approx(float(clean.square().sum() / x.square().sum()), abs=1e-12)
        assert float(loss.noise_total[k]) == pytest.approx(float(noisy.square().sum() / x.square().sum()), abs=1e-12)


def test_the_printed_noise_terms_are_no_upper_bound_and_those_of_the_inverse_are_what_it_makes() -> None:
    """R1: over many draws of noise the attacker of full rank errs by ``noise_total``, far above ``noise``."""
    generator = Seed(4).generator("matrix")
    G = torch.randn((40, 6), generator=generator, dtype=torch.float64)
    x = torch.rand(6, generator=generator, dtype=torch.float64)
    for name in ("shared_noise", "data_noise"):
        loss = inversion_loss(spectrum(jacobian_of(lambda point: G @ point, x)), **{name: 1.0})  # type: ignore[arg-type]
        noise = torch.randn((40 if name == "shared_noise" else 6, 2000), generator=generator, dtype=torch.float64)
        sent = (G @ x).unsqueeze(1) + (noise if name == "shared_noise" else G @ noise)
        real = torch.linalg.lstsq(G, sent).solution.T - x
        error = float(real.square().sum(1).mean() / x.square().sum())
        assert error == pytest.approx(float(loss.signal[6] + loss.noise_total[6]), rel=0.1)
        assert float(loss.signal[6] + loss.noise[6]) < 0.2 * error


def test_the_score_counts_noise_as_the_inverse_makes_it_unless_the_paper_is_asked_for() -> None:
    spectra = made([2.0, 1.0], [1.0, 1.0], outputs=1000)
    plain = risk_score(spectra, alpha=0.5)
    printed, real = (
        risk_score(spectra, alpha=0.5, shared_noise=1.0, noise_form="paper"),
        risk_score(spectra, alpha=0.5, shared_noise=1.0),
    )
    assert real.score - plain.score == pytest.approx(1000 * (printed.score - plain.score)) == pytest.approx(real.noise_total)


def test_leading_values_refuse_noise() -> None:
    """R4: noise acts through the smallest singular values; the exact score here is a tenth of what leading ones would say."""
    G = torch.randn((60, 30), generator=Seed(6).generator("matrix"), dtype=torch.float64) @ torch.diag(
        0.8 ** torch.arange(30.0).double()
    )
    jacobian = jacobian_of(lambda point: G @ point, torch.rand(30, generator=Seed(7).generator("x"), dtype=torch.float64))
    few = spectrum(jacobian, mode="leading", leading=4)
    assert not few.whole and 0 < risk_score(few, alpha=0.9).invre < 1
    for name, noise in (("shared_noise", 0.1), ("data_noise", 0.1), ("shared_noise", RankVariances(few.values))):
        with pytest.raises(UsageError, match="gram or dense"):
            risk_score(few, alpha=0.9, **{name: noise})  # type: ignore[arg-type]
    assert risk_score(spectrum(jacobian, mode="gram"), alpha=0.9, shared_noise=0.1).invre < 0.1


def test_pruning_costs_what_the_masked_spectrum_says_and_nothing_where_enough_rows_are_left() -> None:
    """The paper charges q zeroed values the q smallest singular vectors; six rows of twelve bring all of x back all the same."""
    generator = Seed(6).generator("matrix")
    G = torch.randn((12, 6), generator=generator, dtype=torch.float64)
    x = torch.rand(6, generator=generator, dtype=torch.float64)
    whole = spectrum(jacobian_of(lambda point: G @ point, x))
    kept = torch.ones(12, dtype=torch.float64)
    kept[6:] = 0
    half = spectrum(jacobian_of(lambda point: kept * (G @ point), x))
    assert float(inversion_loss(half).signal[6]) < 1e-9
    assert torch.allclose(torch.linalg.lstsq(G[:6], (G @ x)[:6].unsqueeze(1)).solution[:, 0], x)
    kept[4:] = 0
    pruned = spectrum(jacobian_of(lambda point: kept * (G @ point), x))
    residual = inversion_loss(pruned, tolerance=1e-4).signal
    assert float(residual[4]) > 0 and float(inversion_loss(whole).signal[6]) < 1e-9


def test_black_and_constant_inputs_are_defined() -> None:
    G = torch.randn((12, 6), generator=Seed(6).generator("matrix"), dtype=torch.float64)
    for x in (torch.zeros(6), torch.full((6,), 0.5)):
        for mode in ("dense", "gram", "leading"):
            score = risk_score(spectrum(jacobian_of(lambda point: G @ point, x), mode=mode), alpha=0.5, shared_noise=0.1)
            assert math.isfinite(score.invre) and math.isfinite(score.score)


def test_fisher_leakage_is_the_norm_over_the_noise() -> None:
    spectra = made([3.0, 4.0][::-1], [1.0, 1.0])
    assert fisher_leakage(spectra, 2.0) == 2.0
    assert diagonal_leakage(spectra, 2.0) == pytest.approx(25 / 4 / 2)
    assert fisher_leakage(spectra, 0.0) == math.inf
    assert diagonal_leakage(made([0.0], [1.0]), 0.0) == 0.0
    with pytest.raises(UsageError):
        fisher_leakage(spectra, -1.0)


def test_ends_of_the_logistic() -> None:
    assert invre(1e9, 0.5) == pytest.approx(0.0) and invre(-1e9, 0.5) == pytest.approx(1.0)
    for wrong in ({"gap_rule": "mrge"}, {"tolerance": 0.0}):
        with pytest.raises(UsageError):
            rank_weights(torch.ones(2), **wrong)
    assert set(GAP_RULES) == {"merge", "clamp", "strict"}
