"""InvL-GNP: where its noise lies, how much there is, what is kept between rounds, and where its attacker looks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradveil.client.update import run_client
from gradveil.data.public import public_images
from gradveil.defenses import ClientView, adapt, build_defense
from gradveil.defenses.invl.gnp import MADE, SCALED, InvLGNP
from gradveil.defenses.invl.gnp_adversary import SubspaceUpdateAdversary
from gradveil.defenses.invl.singular_noise import average_jacobian, class_centres
from gradveil.errors import BadUpdate, UsageError
from gradveil.learning import Learner, loss_by_name
from gradveil.models import build_model
from gradveil.randomness import Seed
from gradveil.records import Batch, ModelSpec, Observation, ThreatModel, Update
from gradveil.spectra.spectrum import spectrum
from gradveil.tensors import Named, flatten
from gradveil.testing.defenses_adversary import relative_residual

SHAPE, M, CLASSES = (1, 6, 6), 36, 4


class Net(nn.Module):
    """A convolution and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 3, 3, padding=1), nn.Linear(3 * M, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(torch.sigmoid(self.conv(inputs)).flatten(1))
        return outputs


def learner(seed: int = 0, dtype: torch.dtype = torch.float64) -> Learner:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = Net()
    return Learner.of(made, loss_by_name("cross_entropy")).to(dtype)


def batch(labels: tuple[int, ...] = (0, 0, 2, 2, 3)) -> Batch:
    inputs = torch.rand((len(labels), *SHAPE), generator=Seed(1).generator("x"), dtype=torch.float64)
    return Batch(inputs, torch.tensor(labels))


def view(own: Learner, data: Batch, round_index: int = 0, seed: int = 1, public: Tensor | None = None) -> ClientView:
    return ClientView(
        learner=own, seed=Seed(seed), round=round_index, weights=own.weights, raw_batch=data, batch=data, public=public
    )


def zeros(own: Learner) -> Update:
    return Update({name: torch.zeros_like(value) for name, value in own.weights.items()}, 5)


def reference(own: Learner, data: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Return U and σ of the mean over the classes that are there, by reverse mode and numpy."""

    def gradient(x: Tensor, label: Tensor) -> Tensor:
        return flatten(own.gradient(own.weights, x.reshape(1, *SHAPE), label.reshape(1)))

    matrices = []
    for label in sorted(set(data.targets.tolist())):
        mean = data.inputs[data.targets == label].mean(0).reshape(-1)
        matrices.append(torch.func.jacrev(gradient)(mean, torch.tensor(label)).numpy())
    left, sigma, _ = np.linalg.svd(np.mean(matrices, axis=0), full_matrices=False)
    return left, sigma


def ranks(sigma: np.ndarray) -> tuple[int, int]:
    share = sigma.cumsum() / sigma.sum()
    return int((share < 0.6).sum()) + 1, int((share < 0.95).sum()) + 1


def noise(defense: InvLGNP, own: Learner, data: Batch, seed: int = 1) -> np.ndarray:
    sent, _ = defense.protect_update(zeros(own), view(own, data, seed=seed), {})
    return flatten(sent.weights).numpy()


@pytest.mark.parametrize("mode", ["dense", "gram"])
def test_noise_lies_between_the_two_shares_of_the_average_over_present_classes(mode: str) -> None:
    own, data = learner(), batch()
    left, sigma = reference(own, data)
    j, k = ranks(sigma)
    assert 0 < j < k < M
    found = noise(InvLGNP(mode=mode), own, data)  # type: ignore[arg-type]
    inside = left[:, j:k] @ (left[:, j:k].T @ found)
    assert np.linalg.norm(found - inside) < 1e-6 * np.linalg.norm(found)
    other, _ = reference(own, batch((0, 0, 2, 2, 1)))
    assert np.linalg.norm(found - other[:, j:k] @ (other[:, j:k].T @ found)) > 0.1 * np.linalg.norm(found)


def test_noise_has_the_told_variance_along_each_direction() -> None:
    own, data = learner(), batch()
    left, sigma = reference(own, data)
    j, k = ranks(sigma)
    for defense, variance in ((InvLGNP(delta=0.25), 0.25), (InvLGNP(delta=0.25, variance=False), 0.0625)):
        sent, state = defense.protect_update(zeros(own), view(own, data), {})
        drawn = [flatten(sent.weights).numpy()]
        for seed in range(2, 160):
            again, _ = defense.protect_update(zeros(own), view(own, data, seed=seed), state)
            drawn.append(flatten(again.weights).numpy())
        along = np.stack(drawn) @ left[:, j:k]
        assert float(along.var()) == pytest.approx(variance, rel=0.08)
        assert np.abs(np.corrcoef(along.T) - np.eye(k - j)).max() < 0.4


def test_sparing_nothing_starts_at_the_first_direction() -> None:
    own, data = learner(), batch()
    left, sigma = reference(own, data)
    _, k = ranks(sigma)
    found = noise(InvLGNP(spared=0.0), own, data)
    assert np.linalg.norm(found - left[:, :k] @ (left[:, :k].T @ found)) < 1e-6 * np.linalg.norm(found)
    assert abs(left[:, 0] @ found) > 0


def test_the_average_over_centres_has_layers_and_equals_the_mean() -> None:
    own, data = learner(), batch()
    jacobian = average_jacobian(own, *class_centres(data.inputs, data.targets, "test"))
    dense, layered = spectrum(jacobian, mode="dense"), spectrum(jacobian, mode="gram")
    assert layered.notes == ()
    assert torch.allclose(dense.values, layered.values, atol=1e-7 * float(dense.values[0]))
    assert np.allclose(dense.values.numpy(), reference(own, data)[1], rtol=1e-9, atol=1e-12)


def test_a_basis_is_kept_at_its_own_weights_until_it_is_old() -> None:
    own, moved, data = learner(), learner(seed=5), batch()
    defense = InvLGNP(refresh=2)
    first, state = defense.protect_update(zeros(own), view(own, data), {})
    later, kept = defense.protect_update(zeros(own), view(moved, data, 1), state)
    assert all(torch.equal(kept[name], value) for name, value in state.items())
    left, sigma = reference(own, data)
    j, k = ranks(sigma)
    found = flatten(later.weights).numpy()
    assert np.linalg.norm(found - left[:, j:k] @ (left[:, j:k].T @ found)) < 1e-6 * np.linalg.norm(found)
    assert not torch.equal(flatten(first.weights), flatten(later.weights))
    _, renewed = defense.protect_update(zeros(own), view(moved, data, 2), state)
    assert int(renewed[MADE]) == 2 and not torch.equal(renewed[SCALED], state[SCALED])


def test_one_direction_keeps_its_noise_on_the_steepest_spectrum() -> None:
    own, data = learner(), batch()
    _, state = InvLGNP(share=0.02, spared=0.01).protect_update(zeros(own), view(own, data), {})
    assert len(state[SCALED]) == 1


def test_a_network_that_ignores_its_input_gets_no_noise() -> None:
    own, data = learner(), batch()
    deaf = own.replace(weights={n: torch.zeros_like(v) if n == "conv.weight" else v for n, v in own.weights.items()})
    deaf = deaf.replace(weights={n: torch.zeros_like(v) if n == "head.weight" else v for n, v in deaf.weights.items()})
    sent, state = InvLGNP().protect_update(zeros(own), view(deaf, data), {})
    assert len(state[SCALED]) == 0
    assert float(flatten(sent.weights).abs().max()) == 0


def test_an_update_of_another_model_is_refused() -> None:
    own, data = learner(), batch()
    with pytest.raises(BadUpdate, match="other tensors than the model"):
        InvLGNP().protect_update(Update({"w": torch.zeros(3)}, 5), view(own, data), {})


def test_public_centres_need_public_inputs() -> None:
    own, data = learner(), batch()
    with pytest.raises(UsageError, match="set centres='own'"):
        InvLGNP(centres="public").protect_update(zeros(own), view(own, data), {})


def observe(defense: InvLGNP, own: Learner, data: Batch, public: Tensor | None) -> Observation:
    payload = run_client(own, data, defense, Seed(3), public=public).payload
    update = defense.decode(payload, ModelSpec.of(own.model))
    return Observation(
        (own,), (update,), (payload,), SHAPE, CLASSES, len(data), ThreatModel(), defense.adversary(), public=public
    )


def residual(seen: Observation, data: Batch) -> float:
    evidence: Named = seen.adversary.evidence(seen, 0)
    return float(relative_residual(seen.adversary, seen.learner, evidence, data.inputs, data.targets, {}))


def test_with_public_centres_the_attacker_finds_the_update_exact_outside_the_noise() -> None:
    own, data = learner(), batch()
    public = torch.rand((8, *SHAPE), generator=Seed(4).generator("public"), dtype=torch.float64)
    defense = InvLGNP(delta=0.25, centres="public")
    seen = observe(defense, own, data, public)
    raw = own.gradient(own.weights, data.inputs, data.targets)
    assert float((flatten(seen.update.weights) - flatten(raw)).norm() / flatten(raw).norm()) > 1
    assert residual(seen, data) < 1e-5  # what is left of the noise inside the span, at its weight
    wrong = data.replace(inputs=data.inputs.flip(0))
    assert residual(seen, wrong) > 100 * residual(seen, data)
    assert not seen.adversary.arrives(seen).incomplete
    assert seen.adversary.arrives(seen.replace(public=None)).incomplete


def test_with_own_centres_the_attacker_guesses_and_says_so() -> None:
    own, data = learner(), batch()
    seen = observe(InvLGNP(delta=1e-4), own, data, None)
    assert isinstance(seen.adversary, SubspaceUpdateAdversary)
    assert seen.adversary.arrives(seen).incomplete
    assert seen.adversary.arrives(seen).exact() == frozenset()
    blind = observe(InvLGNP(delta=1e-4), own, data, None).replace(adversary=InvLGNP(delta=0.0).adversary())
    assert residual(seen, data) < residual(blind, data)


def test_the_server_makes_its_basis_once_for_all_clients() -> None:
    own = learner(dtype=torch.float32)
    public = public_images(SHAPE, 4, Seed(0))
    defense = InvLGNP(centres="public")
    data = batch()
    clients = [Batch(data.inputs[i : i + 1].float(), data.targets[i : i + 1]) for i in range(2)]
    first, second = (observe(defense, own, each, public) for each in clients)
    assert first.adversary.evidence(first, 0)["basis"] is second.adversary.evidence(second, 0)["basis"]


def test_clients_with_public_centres_share_one_basis_and_others_do_not() -> None:
    own, data = learner(), batch()
    public = torch.rand((8, *SHAPE), generator=Seed(4).generator("public"), dtype=torch.float64)
    shared = InvLGNP(centres="public")
    copies = [own.replace(settings=own.settings.replace(learning_rate=rate)) for rate in (0.1, 0.2)]
    seen = [shared.protect_update(zeros(own), view(each, data, public=public), {})[1][SCALED] for each in copies]
    assert seen[0] is seen[1]
    copied = own.replace(weights={name: value.clone() for name, value in own.weights.items()})
    _, equal = shared.protect_update(zeros(own), view(copied, data, public=public.clone()), {})
    assert equal[SCALED] is seen[0], "equal content is enough, whichever objects hold it"
    moved = own.replace(weights={name: value * 1.01 for name, value in own.weights.items()})
    others = [
        shared.protect_update(zeros(own), view(moved, data, public=public), {}),
        shared.protect_update(zeros(own), view(own, data, public=public * 0.9), {}),
        InvLGNP(centres="public", share=0.9).protect_update(zeros(own), view(own, data, public=public), {}),
        InvLGNP().protect_update(zeros(own), view(own, data, public=public), {}),
    ]
    assert all(state[SCALED] is not seen[0] for _, state in others)


def test_a_model_too_large_for_the_basis_is_compared_plainly_and_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    own, data = learner(), batch()
    seen = observe(InvLGNP(centres="public"), own, data, data.inputs)
    monkeypatch.setattr("gradveil.defenses.invl.gnp_adversary.MOST_ENTRIES", 10)
    assert "basis" not in seen.adversary.evidence(seen, 0)
    assert seen.adversary.arrives(seen).incomplete


def test_an_adapted_model_is_taken_at_the_mean_of_its_noise() -> None:
    chained = build_defense("precode(latent=4) + invl_gnp(delta=0.01)")
    adapted = adapt(chained, build_model("lenet", input_shape=(1, 12, 12), classes=3, seed=Seed(0)))
    loss = loss_by_name("cross_entropy")
    own = Learner.of(adapted.model, adapted.adapt_loss(loss) if adapted.adapt_loss else loss)
    own = own.replace(noise={name: torch.zeros((1, 2, *shape)) for name, shape in adapted.noise_shapes.items()})
    data = Batch(torch.rand((2, 1, 12, 12), generator=Seed(0).generator("x")), torch.tensor([0, 2]))
    for defense in (chained, build_defense("precode(latent=4) + invl_dnp(delta=0.01)")):
        payload = run_client(own, data, defense, Seed(1)).payload
        assert all(
            bool(torch.isfinite(value).all()) for value in defense.decode(payload, ModelSpec.of(own.model)).weights.values()
        )
