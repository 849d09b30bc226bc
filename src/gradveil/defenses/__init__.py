"""Defenses, one file each. Adding one: write the file, add one import line here."""

from gradveil.defenses.base import DEFENSES, AdaptedModel, ClientView, Defense, DefenseCard, State
from gradveil.defenses.censor import Censor
from gradveil.defenses.chain import Chain, build_defense, chain, granularity_of, parts_of, spell_defense
from gradveil.defenses.clipping import Clipping
from gradveil.defenses.data_noise import DataNoise
from gradveil.defenses.dgp import DGP
from gradveil.defenses.dp_sgd import DPSGD
from gradveil.defenses.embedding_dropout import EmbeddingDropout
from gradveil.defenses.embedding_noise import EmbeddingNoise
from gradveil.defenses.embedding_pruning import EmbeddingPruning
from gradveil.defenses.entry_dropout import EntryDropout
from gradveil.defenses.example_clipping import ExampleClipping
from gradveil.defenses.gaussian_noise import GaussianNoise
from gradveil.defenses.graddefense import GradDefense
from gradveil.defenses.invl_dnp import InvLDNP
from gradveil.defenses.invl_enp import InvLENP
from gradveil.defenses.invl_gnp import InvLGNP
from gradveil.defenses.laplace_noise import LaplaceNoise
from gradveil.defenses.learning_rate_perturbation import LearningRatePerturbation
from gradveil.defenses.mixed_quantisation import MixedQuantisation
from gradveil.defenses.none import NoDefense
from gradveil.defenses.outpost import Outpost
from gradveil.defenses.percentile_noise import PercentileNoise
from gradveil.defenses.pfgd import PFGD
from gradveil.defenses.precode import PRECODE
from gradveil.defenses.pruning import Pruning
from gradveil.defenses.quantisation import Quantisation
from gradveil.defenses.refiner import Refiner
from gradveil.defenses.shadow import Shadow
from gradveil.defenses.soteria import Soteria
from gradveil.defenses.svdefense import SVDefense
from gradveil.defenses.top_k import TopK

__all__ = [
    "DEFENSES",
    "DGP",
    "DPSGD",
    "PFGD",
    "PRECODE",
    "AdaptedModel",
    "Censor",
    "Chain",
    "ClientView",
    "Clipping",
    "DataNoise",
    "Defense",
    "DefenseCard",
    "EmbeddingDropout",
    "EmbeddingNoise",
    "EmbeddingPruning",
    "EntryDropout",
    "ExampleClipping",
    "GaussianNoise",
    "GradDefense",
    "InvLDNP",
    "InvLENP",
    "InvLGNP",
    "LaplaceNoise",
    "LearningRatePerturbation",
    "MixedQuantisation",
    "NoDefense",
    "Outpost",
    "PercentileNoise",
    "Pruning",
    "Quantisation",
    "Refiner",
    "SVDefense",
    "Shadow",
    "Soteria",
    "State",
    "TopK",
    "build_defense",
    "chain",
    "granularity_of",
    "parts_of",
    "spell_defense",
]
