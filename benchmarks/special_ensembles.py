"""Ensembles that only benchmarks use: narrower than `quick` and `standard`, for a question that a table asks.

Importing this module makes them known by name, as `--ensemble` of the benchmarks beside it.
"""

from __future__ import annotations

import dataclasses

from gradveil.attacks.ensembles import ENSEMBLES, QUICK, STANDARD, Ensemble, Member
from gradveil.attacks.feature_inversion import FeatureInversion
from gradveil.attacks.inverting_gradients import InvertingGradients

# For large networks, where an ensemble costs minutes a row: the published recipe in its own settings, by someone who ignores the
# defense, by someone who knows it and by someone who reads masks off the zeros; feature inversion costs next to nothing.
ENSEMBLES["published-recipe-1"] = Ensemble(
    "published-recipe-1",
    "Inverting gradients as published, 1,000 steps, plain, informed and with a mask; feature inversion.",
    (Member(InvertingGradients(steps=1000), ("plain", "informed", "zero_mask")), Member(FeatureInversion(steps=300))),
    rehearsals=1,
)

# What the published recipe lacks where only the loudest direction of each layer arrives: under one cosine that direction, which
# hardly differs between pictures, drowns the quiet exact tensors, and one small weight of total variation leaves the rest noise.
# Here it stands alone beside the cheap attack it has to beat; with no rehearsal the better fit is chosen.
(_smooth_layers,) = (member.attack for member in ENSEMBLES["standard-3"].members if member.where_equal)
ENSEMBLES["smooth-layers-1"] = Ensemble(
    "smooth-layers-1",
    "The smooth recipe that weighs all tensors alike, informed; feature inversion.",
    (Member(_smooth_layers, ("informed",)), Member(FeatureInversion(steps=300))),
    rehearsals=0,
)

# Several rounds multiply the cost, and only those who know the tilt of the hardened SVDefense can use them: the two recipes of
# `quick` as such attackers.
ENSEMBLES["informed-1"] = Ensemble(
    "informed-1",
    "The two matching recipes of quick-1, informed; no rehearsal.",
    tuple(Member(member.attack, ("informed",)) for member in QUICK.members[:2]),
    rehearsals=0,
)

# What arrives exactly, or nearly so, says its last words late: the four smooth recipes of `standard`, informed, at full length.
ENSEMBLES["patient-1"] = Ensemble(
    "patient-1",
    "The four smooth recipes of standard-1, informed, one start each; no rehearsal.",
    tuple(Member(dataclasses.replace(member.attack, restarts=1), ("informed",)) for member in STANDARD.members[:4]),
    rehearsals=0,
)
