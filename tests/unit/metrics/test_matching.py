"""Assignment, identification and label accuracy against brute force."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradveil.errors import UsageError
from gradveil.metrics import assign, identification, identified, label_hits, ranks


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def test_assign_undoes_a_shuffle() -> None:
    originals = draw((6, 3, 8, 8), 0)
    shuffle = torch.tensor([3, 0, 5, 1, 4, 2])
    reconstructed = originals[shuffle] + 0.01
    assert torch.allclose(reconstructed[assign(reconstructed, originals)], originals + 0.01)


@pytest.mark.parametrize("seed", range(5))
def test_assign_has_the_smallest_total(seed: int) -> None:
    reconstructed, originals = draw((4, 6), seed), draw((4, 6), seed + 50)
    found = (reconstructed[assign(reconstructed, originals)] - originals).square().sum()
    best = min((reconstructed[list(order)] - originals).square().sum() for order in itertools.permutations(range(4)))
    assert found.item() == pytest.approx(best.item())


def test_assign_counts_a_good_guess_once() -> None:
    # Reconstruction 0 is nearest to both records; it may only serve one.
    originals = torch.tensor([[0.5], [0.55]])
    assert sorted(assign(torch.tensor([[0.52], [0.0]]), originals).tolist()) == [0, 1]


def test_assign_of_one_record() -> None:
    assert assign(draw((1, 3), 0), draw((1, 3), 1)).tolist() == [0]


def test_ranks_by_hand() -> None:
    candidates = torch.tensor([[0.0], [0.2], [0.6], [1.0]])
    assert ranks(torch.tensor([[0.05], [0.05], [0.55], [0.9]]), [0, 1, 3, 3], candidates).tolist() == [1, 2, 3, 1]
    assert identified(torch.tensor([1, 2])).tolist() == [True, False]


def test_ties_count_against_the_attacker() -> None:
    candidates = torch.tensor([[0.2, 0.8], [0.8, 0.2], [0.2, 0.8], [1.0, 1.0]])
    # Grey is equally far from the first three; an exact guess is tied with its duplicate.
    assert ranks(torch.tensor([[0.5, 0.5], [0.2, 0.8]]), [0, 0], candidates).tolist() == [3, 2]


def test_a_constant_guess_among_mirror_images_identifies_nobody() -> None:
    image = draw((3, 32, 32), 4)
    candidates = torch.stack([image, image.flip(-1), image.flip(-2), image.transpose(1, 2)])
    assert ranks(torch.full((4, 3, 32, 32), 0.3), [0, 1, 2, 3], candidates).tolist() == [4, 4, 4, 4]


def test_near_perfect_guesses_survive_cancellation() -> None:
    # The distances differ by 1e-18 of the squared norms: expanding the square alone could not order them.
    base = 0.5 + 0.5 * draw((1, 3072), 5).double()
    candidates = torch.cat([base, base + 1e-9, base + 3e-9, draw((200, 3072), 6).double()])
    assert ranks(torch.cat([base + 4e-10, base + 6e-10, base + 2.2e-9]), [0, 0, 2], candidates).tolist() == [1, 2, 1]


@pytest.mark.parametrize("entries", [1, 100, 2**23])
def test_ranks_do_not_depend_on_the_chunks(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = draw((23, 12), 1)
    candidates[7] = candidates[3]
    guesses = (candidates[:11] + 0.3 * draw((11, 12), 2)).contiguous()
    distance = (guesses.double()[:, None] - candidates.double()).square().sum(dim=2)
    own = distance[torch.arange(11), torch.arange(11)]
    expected = (distance <= own[:, None] * (1 + 1e-12)).sum(dim=1)
    monkeypatch.setattr(identification, "CHUNK_ENTRIES", entries)
    assert ranks(guesses, torch.arange(11), candidates).tolist() == expected.tolist()


def test_chance_is_one_in_m() -> None:
    candidates, guesses = draw((50, 20), 7), draw((2000, 20), 8)
    index = torch.arange(2000) % 50
    share = identified(ranks(guesses, index, candidates)).double().mean().item()
    assert share == pytest.approx(1 / 50, abs=0.012)  # four standard deviations


@pytest.mark.parametrize(
    ("guesses", "index", "candidates", "message"),
    [
        (torch.zeros(2, 3), [0], torch.zeros(4, 3), "as many indices"),
        (torch.zeros(1, 3), [4], torch.zeros(4, 3), "outside the 4 candidates"),
        (torch.zeros(1, 3), [-1], torch.zeros(4, 3), "outside the 4 candidates"),
        (torch.zeros(1, 3), [0], torch.zeros(4, 2), "do not fit"),
        (torch.zeros(1, 3), [0], torch.full((4, 3), torch.nan), "candidates have entries that are not finite"),
    ],
)
def test_ranks_refuse_what_does_not_fit(guesses: Tensor, index: list[int], candidates: Tensor, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ranks(guesses, index, candidates)


LABELS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=9)


@settings(deadline=None)
@given(LABELS)
def test_label_hits_sum_to_the_overlap_of_the_multisets(pairs: list[tuple[int, int]]) -> None:
    guess, truth = (list(side) for side in zip(*pairs, strict=True))
    hits = label_hits(torch.tensor(guess), torch.tensor(truth))
    assert hits.sum().item() == sum(min(guess.count(label), truth.count(label)) for label in range(4))
    assert all(hit == 1.0 for hit, a, b in zip(hits.tolist(), guess, truth, strict=True) if a == b)


def test_label_credit_goes_to_the_assigned_record_first() -> None:
    order = torch.tensor([2, 1, 0])
    assert label_hits(torch.tensor([5, 0, 1]), torch.tensor([5, 0, 5]), order).tolist() == [0.0, 1.0, 1.0]


def test_soft_labels_count_by_their_largest_entry() -> None:
    assert label_hits(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1])).tolist() == [1.0, 0.0]


@pytest.mark.parametrize(("guess", "truth"), [(torch.zeros(2), torch.zeros(2)), (torch.tensor([1]), torch.tensor([1, 2]))])
def test_label_hits_refuse_what_are_no_labels(guess: Tensor, truth: Tensor) -> None:
    with pytest.raises(UsageError, match="labels"):
        label_hits(guess, truth)
