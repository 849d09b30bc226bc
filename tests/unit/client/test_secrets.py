"""A real client's randomness: fresh for every release, the secret's in every bit, and nowhere to be read."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

from gradveil.client import build_defense, run_client
from gradveil.client.secrets import WORD_BYTES, WORDS, WORDS_AT, SecretSeed
from gradveil.defenses import DEFENSES
from gradveil.learning import Learner, loss_by_name
from gradveil.models import build_model
from gradveil.randomness import Seed
from gradveil.records import Batch, Payload


def release(defense: str, seed: Seed, round_index: int = 3) -> Payload:
    model = build_model("mlp(hidden=8)", input_shape=(1, 4, 4), classes=3, seed=Seed(0))
    batch = Batch(torch.rand((4, 1, 4, 4), generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0]))
    learner = Learner.of(model, loss_by_name("cross_entropy"))
    return run_client(learner, batch, build_defense(defense), seed, round_index=round_index).payload


def entries(payload: Payload) -> torch.Tensor:
    return torch.cat([v.double().flatten() for named in payload.streams.values() for v in named.values()])


@pytest.mark.parametrize("defense", ["gaussian_noise(std=0.1)", "laplace_noise(scale=0.1)", "entry_dropout(rate=0.5)", "dp_sgd"])
def test_one_round_number_twice_gives_other_noise_and_one_secret_the_same(defense: str) -> None:
    first, second = release(defense, SecretSeed.fresh()), release(defense, SecretSeed.fresh())
    assert not torch.equal(entries(first), entries(second))
    secret = SecretSeed.fresh()
    assert torch.equal(entries(release(defense, secret)), entries(release(defense, secret)))
    # An experiment's seed is what lets a server subtract the noise.
    assert torch.equal(entries(release(defense, Seed(1))), entries(release(defense, Seed(1))))


def test_roles_clients_rounds_and_children_are_unrelated() -> None:
    secret = SecretSeed.fresh()
    numbers = [
        secret.number("noise"),
        secret.number("other"),
        secret.number("noise", client=1),
        secret.number("noise", round=1),
        secret.child("a").number("noise"),
        secret.child("a", "b").number("noise"),
        secret.child("ab").number("noise"),
        secret.child("a").child("b", "c").number("noise"),
        SecretSeed.fresh().number("noise"),
    ]
    assert len(set(numbers)) == len(numbers) and all(0 <= number < 2**63 for number in numbers)
    assert secret.child("a").child("b").number("noise") == secret.child("a", "b").number("noise")
    assert isinstance(secret.child("a"), SecretSeed)


def test_a_generator_is_the_secrets_in_all_its_words_and_draws_as_it_should() -> None:
    secret = SecretSeed.fresh()
    generator, seeded = secret.generator("noise"), torch.Generator()
    seeded.manual_seed(secret.number("noise"))
    place = slice(WORDS_AT, WORDS_AT + WORD_BYTES * WORDS)
    words, usual = (np.frombuffer(g.get_state()[place].numpy().tobytes(), dtype="<u8") for g in (generator, seeded))
    assert words.max() < 2**32 and usual.max() < 2**32, "the layout of torch's state has changed"
    assert (words != usual).sum() > WORDS - 3
    before = torch.rand(2 * WORDS, generator=secret.generator("noise"))
    for word in (1, WORDS // 2, WORDS - 1):
        other = generator.get_state()
        other[WORDS_AT + WORD_BYTES * word] ^= 1
        turned = torch.Generator()
        turned.set_state(other)
        assert not torch.equal(torch.rand(2 * WORDS, generator=turned), before)
    drawn = torch.randn(200_000, generator=generator)
    assert abs(float(drawn.mean())) < 0.02 and abs(float(drawn.std()) - 1) < 0.02
    assert secret.numpy("order").random() == secret.numpy("order").random() != secret.numpy("other").random()


def test_a_secret_is_neither_shown_nor_written() -> None:
    secret = SecretSeed.fresh()
    assert str(secret.value) not in repr(secret) and hex(secret.value)[2:] not in repr(secret)
    for write in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="not written anywhere"):
            write(secret)


@pytest.mark.parametrize("name", [name for name in DEFENSES.names() if DEFENSES.card(name).acts_on != ("embedding",)])
def test_a_secret_stands_wherever_a_seed_does(name: str) -> None:
    defense = build_defense(name)
    if set(defense.stations()) - {"prepare"} == {"protect_embedding"} or {"adapted_model", "public", "records"} & defense.needs():
        pytest.skip("needs more than this client has, and is refused")
    assert entries(release(name, SecretSeed.fresh())).isfinite().all()
