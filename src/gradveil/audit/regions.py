"""The same numbers inside the target region: the box around what the model looks at most in each original."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gradveil.audit.judge import Scored, originals
from gradveil.audit.scene import Subject
from gradveil.errors import GradveilError
from gradveil.metrics.regions import REGION, SHARE, bounding_boxes, measure_region
from gradveil.metrics.summary import summarise
from gradveil.models.grad_cam import grad_cam_pp
from gradveil.randomness import Seed
from gradveil.study.measures import Quality
from gradveil.study.results import Region

__all__ = ["region_of_cell"]

NAMES = ("mse", "psnr", "ssim", "lpips")


def region_of_cell(subject: Subject, rows: Mapping[str, Scored | None], seed: Seed) -> Region | str:
    """Return summaries inside the region of each row of reconstructions, or why there is no region.

    The region is the bounding box of the most salient 30 % under Grad-CAM++, at the true labels and the first global weights.
    """
    truth = originals(subject)
    if subject.cell.cut or truth.ndim != 4:
        return "a target region needs a whole model that looks at pictures"
    try:
        boxes = bounding_boxes(_saliency(subject, truth))
    except GradveilError as error:
        return str(error)
    sizes = (boxes[:, 2:] - boxes[:, :2]).prod(dim=1).double() / (truth.shape[2] * truth.shape[3])
    if bool((sizes == 1).all()):
        return "the model singles out no part of these pictures"
    groups = {}
    for name, row in rows.items():
        if row is not None:
            values = measure_region(row.images, truth, boxes, NAMES)
            groups[name] = summarise({key.removeprefix(REGION): each for key, each in values.items()}, seed.child(name), Quality)
    return Region(share=SHARE, area=float(sizes.mean()), **groups)


def _saliency(subject: Subject, truth: Tensor) -> Tensor:
    learner = subject.learner
    targets = torch.cat([target.batch.targets for target in subject.targets]).to(learner.device)

    def forward(inputs: Tensor) -> Tensor:
        return learner.logits(learner.weights, inputs, learner.zero_noise(len(inputs)))

    return grad_cam_pp(forward, learner.model, truth.to(learner.device), targets).cpu()
