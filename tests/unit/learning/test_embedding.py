"""What a party of vertical learning sends, as a learner."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

from gradveil.errors import UsageError
from gradveil.learning import EmbeddingLearner, Learner, loss_by_name
from gradveil.learning.embedding import EMBEDDING, EMBEDDING_GRADIENT
from gradveil.spectra.jacobians import gradient_jacobian

LOSS = loss_by_name("cross_entropy")


def parts() -> tuple[nn.Module, nn.Module]:
    generator = torch.Generator().manual_seed(0)
    bottom = nn.Sequential(nn.Flatten(1), nn.Linear(6, 4), nn.Tanh())
    top = nn.Sequential(nn.Linear(4, 3))
    for parameter in (*bottom.parameters(), *top.parameters()):
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return bottom, top


def inputs(rows: int = 2) -> torch.Tensor:
    return torch.rand((rows, 2, 3), generator=torch.Generator().manual_seed(1))


def test_update_is_the_embedding_of_the_bottom_model() -> None:
    bottom, _ = parts()
    learner = EmbeddingLearner.of_bottom(bottom, LOSS)
    sent = learner.update(inputs(), torch.zeros(2, dtype=torch.int64))
    assert list(sent) == [EMBEDDING]
    assert torch.equal(sent[EMBEDDING], bottom(inputs()))
    assert torch.equal(learner.embed(inputs()), bottom(inputs()))


def test_labels_do_not_reach_the_embedding_but_reach_its_gradient() -> None:
    bottom, top = parts()
    learner = EmbeddingLearner.of_bottom(bottom, LOSS, top=top)
    one, other = (learner.update(inputs(), torch.full((2,), label)) for label in (0, 1))
    assert torch.equal(one[EMBEDDING], other[EMBEDDING])
    assert not torch.allclose(one[EMBEDDING_GRADIENT], other[EMBEDDING_GRADIENT])


def test_gradient_of_the_embedding_is_the_one_autograd_gives() -> None:
    bottom, top = parts()
    labels = torch.tensor([2, 0])
    embedding = bottom(inputs()).detach().requires_grad_()
    nn.functional.cross_entropy(top(embedding), labels).backward()
    sent = EmbeddingLearner.of_bottom(bottom, LOSS, top=top).update(inputs(), labels)
    assert torch.allclose(sent[EMBEDDING_GRADIENT], embedding.grad, atol=1e-7)


def test_moves_with_its_top_model_and_keeps_its_kind() -> None:
    bottom, top = parts()
    learner = EmbeddingLearner.of_bottom(bottom, LOSS, top=top).to(torch.float64)
    assert isinstance(learner.replace(), EmbeddingLearner) and type(learner.top) is Learner
    sent = learner.update(inputs().double(), torch.zeros(2, dtype=torch.int64))
    assert {value.dtype for value in sent.values()} == {torch.float64}


def test_many_candidates_at_once_equal_one_after_the_other() -> None:
    bottom, top = parts()
    learner = EmbeddingLearner.of_bottom(bottom, LOSS, top=top)
    many, labels = inputs(6).reshape(3, 2, 2, 3), torch.tensor([[0, 1], [2, 0], [1, 1]])
    together = vmap(learner.update)(many, labels)
    for row in range(3):
        alone = learner.update(many[row], labels[row])
        assert all(torch.allclose(together[name][row], alone[name], atol=1e-6) for name in alone)


def test_bottom_alone_has_no_training_loss_and_with_its_top_it_has() -> None:
    bottom, top = parts()
    labels = torch.tensor([2, 0])
    with pytest.raises(UsageError, match="no training loss"):
        alone = EmbeddingLearner.of_bottom(bottom, LOSS)
        alone.objective(alone.weights, inputs(), labels)
    learner = EmbeddingLearner.of_bottom(bottom, LOSS, top=top)
    expected = nn.functional.cross_entropy(top(bottom(inputs())), labels)
    assert torch.allclose(learner.objective(learner.weights, inputs(), labels), expected)


def test_jacobian_is_that_of_the_embedding() -> None:
    bottom, _ = parts()
    learner = EmbeddingLearner.of_bottom(bottom, LOSS)
    record = inputs()[0]
    jacobian = gradient_jacobian(learner, record, torch.tensor(0))
    assert jacobian.learner is None, "an embedding has no layers of weight gradients to sum over"
    precise = {name: value.double() for name, value in bottom.named_parameters()}
    expected = torch.autograd.functional.jacobian(
        lambda x: functional_call(bottom, precise, (x.unsqueeze(0),))[0], record.double()
    ).reshape(4, 6)
    assert torch.allclose(jacobian.push(torch.eye(6, dtype=torch.float64)).T, expected)
