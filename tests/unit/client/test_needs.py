"""Whoever cannot give what a defense needs is refused, instead of sending what is not protected."""

from __future__ import annotations

import copy

import pytest

from gradveil.client import run_client, unmet_need
from gradveil.defenses import build_defense
from gradveil.errors import UsageError
from gradveil.learning import Learner
from gradveil.randomness import Seed
from gradveil.testing.defenses import needs_are_real
from gradveil.testing.defenses_scene import EXAMPLES, Scene, TinyNet, steeper_loss

FINISHED = "which a finished update does not have any more"


@pytest.mark.parametrize(
    ("spelling", "words"),
    [
        ("soteria", "the client's own inputs and the gradient of every local step"),
        ("data_noise", "the client's own inputs"),
        ("dp_sgd", "the gradient of every local step and a say in how local training goes"),
        ("precode", "a model of its own making"),
        ("clipping + censor", "the labels and the training loss"),
    ],
)
def test_one_who_has_only_a_finished_update_is_told_what_is_missing(spelling: str, words: str) -> None:
    fault = unmet_need(build_defense(spelling), (), FINISHED)
    assert fault is not None and words in fault and fault.endswith(FINISHED)
    assert "\n" not in fault


@pytest.mark.parametrize("spelling", ["none", "gaussian_noise", "clipping + pruning", "top_k"])
def test_what_acts_on_updates_alone_needs_nothing_else(spelling: str) -> None:
    assert unmet_need(build_defense(spelling), (), FINISHED) is None


def test_a_chain_needs_what_its_parts_need() -> None:
    assert build_defense("none + clipping").needs() == frozenset()
    assert build_defense("dp_sgd + data_noise").needs() == {"batch", "gradient", "training_loop"}


def test_a_client_without_public_inputs_is_refused_before_it_trains() -> None:
    defense = build_defense("invl_gnp(centres='public')")
    scene = Scene.of(defense)
    with pytest.raises(UsageError, match="needs public inputs, and there are none"):
        run_client(scene.learner, scene.batch, defense, Seed(0))
    run_client(scene.learner, scene.batch, defense, Seed(0), public=scene.batch.inputs[:EXAMPLES])


@pytest.mark.parametrize(
    "spelling", ["invl_gnp(centres='public')", "invl_enp(basis='public')", "invl_dnp(basis='class')", "graddefense(clip=0.1)"]
)
def test_needs_are_real_also_at_other_settings(spelling: str) -> None:
    defense = build_defense(spelling)
    needs_are_real(defense, Scene.of(defense))


def test_a_model_that_its_defense_did_not_adapt_sends_nothing() -> None:
    """Such a client used to send the undefended gradient, bit for bit."""
    defense, other = build_defense("clipping + precode(latent=4)"), build_defense("precode(latent=8)")
    bare, scene = Learner.of(TinyNet(), steeper_loss), Scene.of(defense)
    for learner in (bare, Scene.of(other).learner, bare.replace(model=defense.adapt_model(TinyNet()).model)):
        with pytest.raises(UsageError, match=r"precode.* protects only models of its own making; train `gradveil.client.adapt"):
            run_client(learner, scene.batch, defense, Seed(0))
    run_client(scene.learner, scene.batch, defense, Seed(0))
    # A copy is still one of its own, and a defense that adapts nothing takes any model.
    run_client(scene.learner.replace(model=copy.deepcopy(scene.learner.model)), scene.batch, defense, Seed(0))
    run_client(bare, scene.batch, build_defense("clipping"), Seed(0))
