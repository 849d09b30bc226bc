"""Attacks on what a party of vertical learning sends."""

from __future__ import annotations

import pytest
import torch

from gradveil.adversary import OpenAdversary
from gradveil.attacks import ATTACKS, launch, line_up, resolve
from gradveil.attacks.engine.labels import recover_labels
from gradveil.attacks.piste import Decoder, PisteLike
from gradveil.attacks.referee import Referee
from gradveil.errors import UsageError
from gradveil.learning import EmbeddingLearner, Learner, loss_by_name
from gradveil.metrics.psnr import peak_signal_to_noise
from gradveil.models import build_model, split_model
from gradveil.randomness import Seed
from gradveil.records import Knowledge, Observation, Reconstruction, ThreatModel, Update
from gradveil.testing.attacks_scene import home_pictures
from tests.unit.attacks.scenes import make_context

SHAPE, CLASSES = (3, 16, 16), 4
LOSS = loss_by_name("cross_entropy")


def party(spelling: str = "lenet(activation='relu')", cut: str = "cut1", *, gradient: bool = False) -> EmbeddingLearner:
    model = build_model(spelling, input_shape=SHAPE, classes=CLASSES, seed=Seed(1))
    bottom, top = split_model(model, cut)
    return EmbeddingLearner.of_bottom(bottom, LOSS, top=top if gradient else None)


def seen(learner: EmbeddingLearner, inputs: torch.Tensor, labels: torch.Tensor) -> Observation:
    sees = "embedding" if learner.top is None else "embedding_gradient"
    return Observation(
        learners=(learner,),
        updates=(Update({n: v.detach() for n, v in learner.update(inputs, labels).items()}, examples=len(inputs)),),
        payloads=(),
        input_shape=SHAPE,
        classes=CLASSES,
        examples=len(inputs),
        threat=ThreatModel(sees=sees),  # type: ignore[arg-type]
        adversary=OpenAdversary(),
    )


@pytest.mark.parametrize("spelling", ["idlg(steps=200)", "dlg(steps=200)", "inverting_gradients(steps=300)"])
def test_published_attacks_work_on_embeddings_as_they_are(spelling: str) -> None:
    picture = home_pictures()[:1]
    observation = seen(party("lenet"), picture, torch.tensor([2]))
    (found,) = launch(ATTACKS.build(spelling), [observation], make_context(budget=300))
    grey = peak_signal_to_noise(torch.full_like(picture, 0.5), picture)
    assert float(peak_signal_to_noise(found.inputs, picture)) > float(grey) + 8


def test_decoder_finds_what_matching_pixels_does_not() -> None:
    """Where the embedding is a quarter of the input, pixels are underdetermined and a decoder's prior decides."""
    pictures = home_pictures()[:2]
    everyone = [seen(party(cut="cut2"), pictures[i : i + 1], torch.tensor([0])) for i in range(2)]
    pixels, painted = (
        launch(ATTACKS.build(spelling), everyone, make_context(budget=200))
        for spelling in ("inverting_gradients(steps=200, objective='l2', signed=False)", "piste_like(steps=200)")
    )
    for one, other, truth in zip(pixels, painted, pictures, strict=True):
        gain = peak_signal_to_noise(other.inputs, truth[None]) - peak_signal_to_noise(one.inputs, truth[None])
        assert float(gain) > 5


@pytest.mark.parametrize("shape", [(3, 16, 16), (1, 7, 10), (2, 9), (5,)])
def test_decoder_paints_any_shape_inside_the_box(shape: tuple[int, ...]) -> None:
    decoder = Decoder(shape, 8, 4)
    weights = decoder.drawn(torch.Generator().manual_seed(0))
    painted = torch.func.functional_call(decoder, weights, (torch.randn((3, 8), generator=torch.Generator().manual_seed(1)),))
    assert painted.shape == (3, *shape)
    assert 0 < float(painted.min()) < float(painted.max()) < 1


def test_decoder_is_for_embeddings_and_says_so() -> None:
    model = build_model("lenet", input_shape=SHAPE, classes=CLASSES, seed=Seed(1))
    learner = Learner.of(model, LOSS)
    update = Update(learner.update(home_pictures()[:1], torch.tensor([1])), examples=1)
    other = seen(party(), home_pictures()[:1], torch.tensor([1])).replace(learners=(learner,), updates=(update,))
    assert PisteLike().applies(other) == "no embedding was seen"
    with pytest.raises(UsageError, match="no stance"):
        PisteLike(stance="averaged")
    with pytest.raises(UsageError, match="at least 1"):
        PisteLike(width=0)


def test_labels_are_read_off_the_gradient_of_the_embedding_in_the_order_of_the_records() -> None:
    labels = torch.tensor([3, 0, 2, 2])
    observation = seen(party(gradient=True), home_pictures(), labels)
    assert torch.equal(recover_labels(observation), labels)


def test_an_embedding_alone_tells_no_labels_even_where_it_looks_like_a_classifier_layer() -> None:
    learner = party("mlp(hidden=6)")
    observation = seen(learner, home_pictures(), torch.tensor([3, 0, 2, 2]))
    assert observation.update.weights["embedding"].shape == (CLASSES, 6), "as many records as classes"
    assert recover_labels(observation).tolist() == [0, 0, 0, 0]


def test_the_ensemble_for_embeddings_lines_up() -> None:
    observation = seen(party(), home_pictures()[:1], torch.tensor([1]))
    names = [attack.card.name for attack in line_up(resolve("quick", "embedding"), observation, make_context())]
    assert names == ["inverting_gradients", "inverting_gradients", "piste_like"]
    everyone = {attack.card.name for attack in line_up(resolve("standard-1"), observation, make_context())}
    assert not everyone & {"linear_layer", "feature_inversion", "piste_like"}


def test_the_referee_prefers_the_truth() -> None:
    picture = home_pictures()[:1]
    observation = seen(party(), picture, torch.tensor([1]))
    wrong, right = (Reconstruction(x, torch.tensor([0]), recipe="r") for x in (home_pictures()[1:2], picture))
    scores = Referee().scores(observation, [wrong, right])
    assert scores[1] < 1e-9 < scores[0]


def test_the_threat_model_says_what_is_seen() -> None:
    sentences = {sees: ThreatModel(sees=sees).describe() for sees in ("update", "embedding", "embedding_gradient")}
    assert "one client's update" in sentences["update"][0]
    assert "for a prediction; no gradient" in sentences["embedding"][0]
    assert "the gradient of it that comes back" in sentences["embedding_gradient"][0]
    assert "weights of the party's bottom model" in sentences["embedding"][1]
    assert str(Knowledge.ARCHITECTURE) in sentences["update"][1]
    assert ThreatModel(sees="embedding").as_dict()["sees"] == "embedding"
