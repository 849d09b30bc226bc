from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradveil.data import IID, PARTITIONS, ByOwner, ClassBalance, Dataset, Dirichlet, Partition
from gradveil.errors import UsageError
from gradveil.randomness import Seed
from gradveil.registry import config_of, spell

PARTITION = st.one_of(
    st.just(IID()),
    st.builds(Dirichlet, alpha=st.floats(0.01, 100), min_size=st.integers(1, 3)),
    st.builds(ByOwner, grouped=st.booleans(), min_size=st.integers(1, 3)),
    st.builds(ClassBalance, rho=st.floats(0, 1)),
)


def data(targets: list[int], owners: list[int] | None = None, classes: int = 5) -> Dataset:
    return Dataset(
        name="mine",
        inputs=torch.zeros(len(targets), 1),
        targets=torch.tensor(targets),
        classes=classes,
        class_names=tuple("abcde"[:classes]),
        records=tuple(str(row) for row in range(len(targets))),
        owners=None if owners is None else tuple(f"owner {owner}" for owner in owners),
    )


DATA = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), min_size=1, max_size=80).map(
    lambda rows: data([label for label, _ in rows], [owner for _, owner in rows])
)


@settings(max_examples=150, deadline=None)
@given(partition=PARTITION, dataset=DATA, clients=st.integers(1, 12), seed=st.integers(0, 2**40))
def test_no_record_twice_no_client_empty_same_seed_same_split(
    partition: Partition, dataset: Dataset, clients: int, seed: int
) -> None:
    try:
        split = partition.split(dataset, clients, Seed(seed))
    except UsageError as error:
        assert "\n" not in str(error)
        assert "clients" in str(error)
        assert clients > 1 or getattr(partition, "min_size", 1) > 1
        return
    rows = [row for part in split for row in part]
    assert len(split) == clients
    assert all(split)
    assert all(type(row) is int and 0 <= row < len(dataset) for row in rows)
    assert len(set(rows)) == len(rows)
    assert all(part == sorted(part) for part in split)
    assert split == partition.split(dataset, clients, Seed(seed))
    if isinstance(partition, (IID, Dirichlet)):
        assert len(rows) == len(dataset)
    if isinstance(partition, Dirichlet):
        assert min(len(part) for part in split) >= partition.min_size


@settings(max_examples=60, deadline=None)
@given(dataset=DATA, clients=st.integers(1, 5), seed=st.integers(0, 2**40), grouped=st.booleans())
def test_owners_are_never_divided(dataset: Dataset, clients: int, seed: int, grouped: bool) -> None:
    assert dataset.owners is not None
    if clients > len(set(dataset.owners)):
        with pytest.raises(UsageError, match=r"too few|cannot share"):
            ByOwner(grouped=grouped).split(dataset, clients, Seed(seed))
        return
    split = ByOwner(grouped=grouped).split(dataset, clients, Seed(seed))
    homes = [{dataset.owners[row] for row in part} for part in split]
    assert sum(len(home) for home in homes) == len(set().union(*homes))
    for home, part in zip(homes, split, strict=True):
        assert sum(owner in home for owner in dataset.owners) == len(part)
        assert grouped or len(home) == 1
    if grouped:
        assert sum(map(len, split)) == len(dataset)


@settings(max_examples=60, deadline=None)
@given(dataset=DATA, rho=st.floats(0, 1), seed=st.integers(0, 2**40))
def test_class_balance_keeps_the_paper_s_shares(dataset: Dataset, rho: float, seed: int) -> None:
    (part,) = ClassBalance(rho=rho).split(dataset, 1, Seed(seed))
    kept = np.bincount(dataset.targets.numpy()[part], minlength=5)
    have = np.array(dataset.counts())
    orders = itertools.permutations([label for label in range(5) if have[label]])
    series = ([math.floor(have[label] * rho**place + 1e-9) for place, label in enumerate(order)] for order in orders)
    assert sorted(kept[have > 0].tolist()) in [sorted(one) for one in series]
    assert sum(kept) >= min(have[have > 0])
    if rho == 1:
        assert kept.tolist() == have.tolist()
    if rho == 0:
        assert int((kept > 0).sum()) == 1


def test_class_balance_of_a_balanced_set_is_the_geometric_series() -> None:
    dataset = data([label for label in range(5) for _ in range(100)])
    (part,) = ClassBalance(rho=0.5).split(dataset, 1, Seed(0))
    kept = np.bincount(dataset.targets.numpy()[part], minlength=5)
    assert sorted(kept.tolist(), reverse=True) == [100, 50, 25, 12, 6]


def test_class_balance_orders_differ_between_clients() -> None:
    dataset = data([label for label in range(5) for _ in range(100)])
    split = ClassBalance(rho=0.1).split(dataset, 8, Seed(0))
    favourite = {int(np.bincount(dataset.targets.numpy()[part], minlength=5).argmax()) for part in split}
    assert len(favourite) > 1


def test_iid_sizes_differ_by_one() -> None:
    sizes = [len(part) for part in IID().split(data([0, 1] * 11), 5, Seed(0))]
    assert max(sizes) - min(sizes) <= 1


def test_dirichlet_alpha_steers_the_imbalance() -> None:
    dataset = data([label for label in range(5) for _ in range(200)])

    def purity(alpha: float) -> float:
        split = Dirichlet(alpha=alpha).split(dataset, 5, Seed(1))
        counts = [np.bincount(dataset.targets.numpy()[part], minlength=5) for part in split]
        return float(np.mean([count.max() / count.sum() for count in counts]))

    assert purity(0.05) > purity(1) > purity(1000)
    assert purity(1000) < 0.25


def test_other_seed_other_split() -> None:
    dataset = data([0, 1, 2, 3] * 20, [0, 1, 2, 3, 4] * 16)
    for partition in (IID(), Dirichlet(), ByOwner(), ClassBalance()):
        assert partition.split(dataset, 2, Seed(0)) != partition.split(dataset, 2, Seed(3))


@pytest.mark.parametrize(
    ("spelling", "words"),
    [
        ("dirichlet(alpha=0)", "positive number"),
        ("dirichlet(alpha=-1)", "positive number"),
        ("dirichlet(min_size=0)", "at least 1 record"),
        ("dirichlet(alhpa=1)", "did you mean 'alpha'"),
        ("class_balance(rho=1.5)", "from 0"),
        ("class_balance(rho=-0.1)", "from 0"),
        ("dirichlett", "did you mean 'dirichlet'"),
    ],
)
def test_bad_settings_are_refused(spelling: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        PARTITIONS.build(spelling)


def test_impossible_splits_say_what_to_do() -> None:
    dataset = data([0, 1, 2])
    for partition in (IID(), Dirichlet(), ClassBalance()):
        with pytest.raises(UsageError, match="ask for at most 3 clients"):
            partition.split(dataset, 4, Seed(0))
        with pytest.raises(UsageError, match="at least 1"):
            partition.split(dataset, 0, Seed(0))
    with pytest.raises(UsageError, match="raise alpha"):
        Dirichlet(alpha=0.001, min_size=3).split(data([0] * 10), 3, Seed(0))
    with pytest.raises(UsageError, match="add an owner or patient column"):
        ByOwner().split(dataset, 2, Seed(0))


@pytest.mark.parametrize("name", PARTITIONS.names())
def test_partitions_rebuild_from_their_spelling_and_record(name: str) -> None:
    partition = PARTITIONS.build(name)
    assert PARTITIONS.build(spell(partition)) == partition
    assert PARTITIONS.build(config_of(partition)) == partition


def test_spelling_shows_settings() -> None:
    assert spell(PARTITIONS.build("dirichlet(alpha=0.1)")) == "dirichlet(alpha=0.1)"
