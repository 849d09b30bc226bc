"""Target regions: which box, and what is measured inside it."""

from __future__ import annotations

import pytest
import torch

from gradveil.errors import UsageError
from gradveil.metrics import Unavailable, bounding_boxes, mean_squared_error, measure_region, structural_similarity
from gradveil.metrics.regions import salient
from gradveil.models import build_model
from gradveil.models.grad_cam import grad_cam_pp
from gradveil.randomness import Seed


def test_the_box_holds_the_most_salient_share() -> None:
    saliency = torch.zeros(2, 10, 10)
    saliency[0, 2:7, 3:9] = 1.0  # exactly 30 of 100 pixels
    saliency[1] = torch.arange(100.0).reshape(10, 10)  # the last three rows
    assert salient(saliency).flatten(1).sum(1).tolist() == [30, 30]
    assert bounding_boxes(saliency).tolist() == [[2, 3, 7, 9], [7, 0, 10, 10]]


def test_pixels_of_no_saliency_are_not_salient() -> None:
    """A map may be zero on most of the picture; the zeros tie with the threshold, and still mark nothing."""
    saliency = torch.zeros(1, 10, 10)
    saliency[0, 4:6, 3:8] = torch.rand((2, 5), generator=torch.Generator().manual_seed(0)) + 0.1
    assert bounding_boxes(saliency).tolist() == [[4, 3, 6, 8]]


def test_grad_cam_maps_become_boxes() -> None:
    """The two parts fit together: the maps of a model, the boxes around their top, the metrics inside."""
    model = build_model("convnet(width=2)", input_shape=(1, 12, 12), classes=2, seed=Seed(0))
    images = torch.rand((3, 1, 12, 12), generator=torch.Generator().manual_seed(1))
    boxes = bounding_boxes(grad_cam_pp(model, model, images, torch.tensor([0, 1, 1])))
    found = measure_region(images.flip(3), images, boxes, ["mse"])["region_mse"]
    assert tuple(boxes.shape) == (3, 4) and not isinstance(found, Unavailable) and bool((found > 0).all())


def test_a_constant_map_singles_nothing_out() -> None:
    assert bounding_boxes(torch.zeros(1, 6, 8)).tolist() == [[0, 0, 6, 8]]


def test_single_pixels_and_other_shares() -> None:
    saliency = torch.zeros(1, 4, 4)
    saliency[0, 1, 2] = 5.0
    assert bounding_boxes(saliency, share=0.01).tolist() == [[1, 2, 2, 3]]


def test_metrics_see_the_inside_of_each_box_only() -> None:
    generator = torch.Generator().manual_seed(0)
    original, other = torch.rand((2, 3, 16, 16), generator=generator), torch.rand((2, 3, 16, 16), generator=generator)
    boxes = torch.tensor([[0, 0, 12, 12], [3, 2, 16, 15]])
    inside = original.clone()
    for row, (top, left, bottom, right) in enumerate(boxes.tolist()):
        inside[row, :, top:bottom, left:right] = other[row, :, top:bottom, left:right]
    found = measure_region(inside, original, boxes, ["mse", "psnr", "ssim"])
    assert list(found) == ["region_mse", "region_psnr", "region_ssim"]
    for row, (top, left, bottom, right) in enumerate(boxes.tolist()):
        pair = (x[row : row + 1, :, top:bottom, left:right] for x in (other, original))
        left_image, right_image = pair
        assert found["region_mse"][row].item() == mean_squared_error(left_image, right_image).item()  # type: ignore[index]
        assert found["region_ssim"][row].item() == structural_similarity(left_image, right_image).item()  # type: ignore[index]
    # What happens outside does not matter, unlike in released code, which keeps the complement.
    outside = torch.where(inside == other, inside, torch.zeros_like(inside))
    again = measure_region(outside, original, boxes, ["mse"])["region_mse"]
    assert torch.equal(again, found["region_mse"])  # type: ignore[arg-type]


def test_the_prior_is_cut_too() -> None:
    original = torch.rand((1, 1, 20, 20), generator=torch.Generator().manual_seed(3))
    prior, box = original[0].roll(3, dims=2), torch.tensor([[0, 0, 12, 14]])
    whole = measure_region(original, original, box, ["rdlv_nvflare"], {"prior": prior})["region_rdlv_nvflare"]
    cut = measure_region(
        original[..., :12, :14],
        original[..., :12, :14],
        torch.tensor([[0, 0, 12, 14]]),
        ["rdlv_nvflare"],
        {"prior": prior[:, :12, :14]},
    )["region_rdlv_nvflare"]
    assert torch.equal(whole, cut)  # type: ignore[arg-type]


def test_a_metric_that_is_missing_for_one_box_is_missing_for_all() -> None:
    images = torch.rand((2, 3, 40, 40), generator=torch.Generator().manual_seed(4))
    found = measure_region(images, images, torch.tensor([[0, 0, 40, 40], [0, 0, 8, 8]]), ["lpips"])["region_lpips"]
    assert isinstance(found, Unavailable) and "regions" in found.reason


@pytest.mark.parametrize(
    ("saliency", "share", "words"),
    [
        (torch.zeros(4, 4), 0.3, "one map"),
        (torch.full((1, 4, 4), float("nan")), 0.3, "not finite"),
        (torch.zeros(1, 4, 4), 0.0, "share"),
    ],
)
def test_bad_saliency_is_refused(saliency: torch.Tensor, share: float, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        bounding_boxes(saliency, share)


def test_a_box_outside_the_picture_is_refused() -> None:
    images = torch.zeros(1, 1, 4, 4)
    with pytest.raises(UsageError, match="does not lie inside"):
        measure_region(images, images, torch.tensor([[0, 0, 5, 4]]), ["mse"])
    with pytest.raises(UsageError, match="boxes"):
        measure_region(images, images, torch.tensor([0, 0, 4, 4]), ["mse"])
