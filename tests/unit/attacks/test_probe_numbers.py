"""What an attacker learns by running the client on inputs of its own: pairs, gains and weights, each beside one by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradveil.attacks.generic.probe import MOST, Probe, probe_of
from gradveil.attacks.generic.stances import robust_weights
from gradveil.tensors import Named
from tests.unit.attacks.scenes import drawn, make_batch, make_context, make_learner, observe, own_inputs


def pairs() -> tuple[Named, Named]:
    """Return raw and sent updates of five inputs: gains that differ, chance alone, silent entries, and nothing at all."""
    raw = {"own": drawn(5, 6) - 0.5, "chance": drawn(5, 3, seed=1) - 0.5, "still": torch.zeros(5, 2).double()}
    raw["own"][:, 5] = 0
    gain = torch.tensor([0.1, 0.5, 1.0, 1.5, 2.0, 1.0]).double()
    noise = 0.01 * (drawn(5, 6, seed=2) - 0.5)
    return raw, {"own": gain * raw["own"] + noise, "chance": drawn(5, 3, seed=3) - 0.5, "still": 0.1 * drawn(5, 2, seed=4)}


@pytest.mark.parametrize("without", [None, 1])
def test_gains_and_weights_of_a_round_are_those_of_the_formulas(without: int | None) -> None:
    raw, sent = pairs()
    other = {n: torch.ones_like(v) for n, v in raw.items()}
    found = Probe((other, raw), (other, sent), {}).reliance(1, without)
    rows = [row for row in range(5) if row != without]
    weights: Named = {}
    for name in raw:
        r, d = raw[name][rows], sent[name][rows]
        size, told = r.square().sum(0), r.square().sum(0) > 0
        overall = float((r * d).sum() / size.sum()) if bool(told.any()) else 0.0
        gain = torch.full_like(size, overall)
        if bool(told.any()):
            alone = torch.where(told, (r * d).sum(0) / size, overall)
            error = float((d - alone * r).square().sum(0)[told].mean()) / (len(rows) - 1)
            differ = float((((alone - overall).square()[told] - error / size[told]) * size[told]).sum() / size[told].sum())
            if differ > 0:
                kappa = error / differ
                gain = ((r * d).sum(0) + kappa * overall) / (size + kappa)
        assert torch.allclose(found.gain[name], gain), name
        left = (d - gain * r).square()
        drawn_in = (left.sum(0) + left.mean()) / (len(rows) + 1)
        weights[name] = (drawn_in + 0.01 * overall**2 * r.square().mean()).rsqrt()
    top = max(float(value.max()) for value in weights.values())
    for name, weight in weights.items():
        assert torch.allclose(found.weight[name], weight / top), name


def test_what_is_learned_of_a_round_is_kept_apart_from_other_rounds() -> None:
    raw, sent = pairs()
    probe = Probe((raw, sent), (sent, raw), {})
    for index in (1, 0):
        found, fresh = probe.learned(index), probe.reliance(index)
        assert probe.learned(index) is found and all(torch.equal(found.gain[n], v) for n, v in fresh.gain.items())
        assert all(torch.equal(found.weight[n], v) for n, v in fresh.weight.items())


def test_a_probe_sends_every_own_input_once_and_crosses_pictures_with_labels() -> None:
    first, second = make_learner("mlp(hidden=2)"), make_learner("mlp(hidden=2)", seed=1)
    seen, calls = observe(first, make_batch(2), rounds=(second,)), list[int]()

    def simulate(inputs: Tensor, targets: Tensor, draw: int) -> tuple[Named, ...]:
        calls.append(draw)
        return tuple({n: v + draw for n, v in one.update(inputs, targets).items()} for one in (first, second))

    inputs, targets = own_inputs(3, size=2)
    context = make_context(simulate=simulate, own=(inputs, targets))
    found = probe_of(seen, context)
    assert found is not None and probe_of(seen, context) is found and calls == [-1, -2, -3]
    for index, learner in enumerate((first, second)):
        for row in range(3):
            for name, value in learner.update(inputs[row], targets[row]).items():
                assert torch.allclose(found.raw[index][name][row], value) and not found.raw[index][name].requires_grad
                assert torch.allclose(found.sent[index][name][row], value - 1 - row)
    for row in range(3):
        for column in range(3):
            crossed = first.update(inputs[column], targets[row])
            assert all(torch.allclose(found.crossed[n][row, column], v) for n, v in crossed.items())
    assert probe_of(seen, make_context(simulate=simulate)) is None and probe_of(seen, make_context(own=(inputs, targets))) is None
    assert probe_of(seen, make_context(simulate=simulate, own=(inputs[:1], targets[:1]))) is None
    calls.clear()
    many = probe_of(seen, make_context(simulate=simulate, own=own_inputs(MOST + 2)))
    assert many is not None and len(calls) == MOST


def test_robust_weights_are_the_third_fit_of_scale_and_residuals() -> None:
    simulated, observed = {"a": drawn(9) - 0.5, "b": drawn(4, seed=1)}, {"a": 3 * (drawn(9) - 0.5), "b": 3 * drawn(4, seed=1)}
    observed["a"][2], observed["a"][5], observed["b"][0] = 40.0, 0.0, -0.5
    simulated["a"][5] = 0.0
    observed = {n: v + 0.02 * (drawn(*v.shape, seed=7) - 0.5) * (v != 0) for n, v in observed.items()}

    def middle(value: Tensor) -> float:
        ordered = sorted(value.abs().tolist())
        return float(ordered[(len(ordered) - 1) // 2])

    told = {n: (v != 0) | (simulated[n] != 0) for n, v in observed.items()}
    scale = sum(middle(v[told[n]]) for n, v in observed.items()) / sum(middle(v[told[n]]) for n, v in simulated.items())
    factors: Named = {}
    for _ in range(3):
        for n, v in observed.items():
            residual = scale * simulated[n] - v
            spread = max(middle(residual[told[n]]), 1e-3 * middle(v[v != 0])) / 0.6745
            factors[n] = 1 / (1 + (residual / (3 * spread)).square())
        along = sum(float((f.square() * simulated[n] * observed[n]).sum()) for n, f in factors.items())
        scale = along / sum(float((f * simulated[n]).square().sum()) for n, f in factors.items())
    found = robust_weights(simulated, observed)
    assert all(torch.allclose(found[n], f) for n, f in factors.items()) and float(found["a"][2]) < 0.01
