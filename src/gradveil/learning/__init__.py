"""Gradient and local steps, shared by the client and by an attacker who replays them."""

from gradveil.learning.embedding import EmbeddingLearner
from gradveil.learning.learner import GradientHook, Learner
from gradveil.learning.losses import LOSSES, Loss, loss_by_name

__all__ = ["LOSSES", "EmbeddingLearner", "GradientHook", "Learner", "Loss", "loss_by_name"]
