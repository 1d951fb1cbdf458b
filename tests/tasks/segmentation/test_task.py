"""The decoder against Segmenter's, windows against plain loops, and metrics against torchmetrics'."""

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex

import vitmods as vm
from vitmods.adapters import from_timm
from vitmods.data import Batch
from vitmods.recipes import Recipe, ade20k, default, small_segmentation
from vitmods.tasks import TASKS, Segmentation
from vitmods.tasks.base import make_task
from vitmods.tasks.drawing import palette
from vitmods.tasks.segmentation.masks import IGNORE
from vitmods.tasks.segmentation.recipes import SegmentationPart
from vitmods.tasks.segmentation.task import LinearDecoder, Segmenter, Windows, overlay
from vitmods.util.errors import UserError


def vit(**overrides):
    torch.manual_seed(0)
    return vm.vit("mu2/4", **{"img_size": 16, "num_classes": 0, **overrides})


def test_the_decoder_is_segmenters(golden):
    g, close = golden("segmenter_decoder_linear"), {"atol": 1e-10, "rtol": 0}
    decoder = LinearDecoder([12], 7).double()
    decoder.load_state_dict(g.group("param"))
    tokens = g["in.x"].requires_grad_()
    rows, columns = (int(side) // int(g["hp.patch"]) for side in g["hp.im_size"])
    outcome = decoder([tokens.mT.unflatten(2, (rows, columns))])
    torch.testing.assert_close(outcome, g["out.y"], **close)
    (outcome * g["ct.y"]).sum().backward()
    torch.testing.assert_close(tokens.grad, g["grad_in.x"], **close)
    for name, parameter in decoder.named_parameters():
        torch.testing.assert_close(parameter.grad, g[f"grad_param.{name}"], **close)


def test_a_pyramids_maps_are_one_linear_layer_on_all_channels():
    torch.manual_seed(0)
    decoder = LinearDecoder([3, 5], 4)
    fine, coarse = torch.randn(2, 3, 8, 8), torch.randn(2, 5, 4, 4)
    together = torch.cat([fine, F.interpolate(coarse, (8, 8), mode="bilinear")], dim=1)
    expected = F.conv2d(together, decoder.head.weight[:, :, None, None], decoder.head.bias)
    torch.testing.assert_close(decoder([fine, coarse]), expected)


@pytest.mark.parametrize("final_norm", [True, False])
def test_patch_tokens_alone_are_decoded_padded_and_cut(final_norm):
    model = Segmenter(vit(reg_tokens=2, dynamic_img_size=True), 3, final_norm).eval()
    nn.init.normal_(model.decoder.head.bias)
    images = torch.randn(2, 3, 14, 17)
    padded = F.pad(images, (0, 3, 0, 2))
    backbone = model.backbone
    tokens = backbone._embed(padded)
    for index in range(len(backbone.blocks)):
        tokens = backbone.blocks[index](tokens)
    tokens = backbone.norm(tokens) if final_norm else tokens
    scores = model.decoder.head(tokens[:, 3:]).mT.unflatten(2, (4, 5))
    expected = F.interpolate(scores, (16, 20), mode="bilinear", align_corners=False)[..., :14, :17]
    torch.testing.assert_close(model(images), expected)


def without_gradient(model, side=32):
    """Parameters that a step does not reach."""
    Segmentation().loss(model, Segmentation().synthetic(2, (3, side, side), 5, Recipe()))[0].backward()
    return [name for name, parameter in model.named_parameters() if parameter.grad is None]


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "pvt_v2_b0"])
def test_timms_vits_and_pyramids_are_backbones_with_a_gradient_everywhere(name):
    options = {"img_size": 32} if name.startswith("vit") else {}
    model = Segmentation().wrap(timm.create_model(name, num_classes=0, **options), 5)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 5, 32, 32)
    assert [name for name in without_gradient(model) if model.get_parameter(name).requires_grad] == []
    model = Segmentation(part=SegmentationPart(final_norm=False)).wrap(vit(), 5)
    assert without_gradient(model, 16) == ["backbone.norm.weight", "backbone.norm.bias"]
    assert not model.backbone.norm.weight.requires_grad


@pytest.mark.parametrize("options", [{}, {"global_pool": "map", "class_token": False}, {"global_pool": "avg"}])
def test_a_timm_model_and_its_counterpart_give_the_same_logits(options):
    torch.manual_seed(0)
    reference = timm.create_model("vit_tiny_patch16_224", img_size=48, num_classes=7, depth=2, **options).eval()
    actual = from_timm(reference).eval()
    made = [Segmentation().wrap(model, 5) for model in (reference, actual)]
    made[1].decoder.load_state_dict(made[0].decoder.state_dict())
    images = torch.randn(2, 3, 48, 48)
    torch.testing.assert_close(made[1](images), made[0](images), atol=1e-4, rtol=1e-4)
    unreached = without_gradient(made[1], 48)
    assert [name for name in unreached if made[1].get_parameter(name).requires_grad] == []


def slow_windows(model, image, window, stride):
    """(K, h, w), one window after the other."""
    height, width = image.shape[-2:]
    tops = [y for y in range(0, height, stride[0]) if y < height - window[0]] + [height - window[0]]
    lefts = [x for x in range(0, width, stride[1]) if x < width - window[1]] + [width - window[1]]
    total, count = 0, torch.zeros(height, width)
    for top in tops:
        for left in lefts:
            logits = model(image[None, :, top : top + window[0], left : left + window[1]])[0]
            padding = (left, width - left - window[1], top, height - top - window[0])
            total = total + F.pad(logits, padding)
            count += F.pad(torch.ones(window), padding)
    return total / count


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_windows_overlap_and_are_averaged_over_scales_and_mirror_images(at_once):
    model = Segmentation().wrap(vit(), 4).eval()
    window, stride = (16, 16), (10, 7)
    images, sizes = [torch.randn(3, 16, 37), torch.randn(3, 25, 16)], [(20, 44), (25, 16)]
    with torch.inference_mode():
        outcome = Windows(window, stride, (1.0, 1.5), flip=True).probabilities(model, images, sizes, at_once)
        for image, size, p in zip(images, sizes, outcome):
            expected = 0
            for scale in (1.0, 1.5):
                scaled = [int(side * scale + 0.5) for side in image.shape[1:]]
                larger = F.interpolate(image[None], scaled, mode="bilinear")[0]
                for mirrored in (False, True):
                    logits = slow_windows(model, larger.flip(-1) if mirrored else larger, window, stride)
                    logits = F.interpolate(logits[None], size, mode="bilinear")[0]
                    expected = expected + (logits.flip(-1) if mirrored else logits).softmax(0) / 4
            torch.testing.assert_close(p, expected, atol=1e-6, rtol=1e-5)


def test_images_smaller_than_a_window_are_enlarged():
    seen, windows = [], Windows((8, 8), (8, 8), (0.5,))
    outcome = windows.probabilities(lambda x: seen.append(x.shape) or x, [torch.rand(2, 8, 12)], [(8, 12)], 9)
    assert seen == [(2, 2, 8, 8)]
    assert outcome[0].shape == (2, 8, 12)


def evaluated(sizes, model, images, masks, **options):
    """What evaluation finds where batches are cut so."""
    batches, start = [], 0
    for n in sizes:
        part = slice(start, start + n)
        targets = {"size": torch.tensor([[16, 20]] * n), "native": torch.tensor([[16, 20]] * n),
                   "window": torch.tensor([[16, 16]] * n), "mask": list(masks[part])}  # fmt: skip
        batches.append(Batch(images[part], targets, torch.arange(start, start + n)))
        start += n
    return Segmentation(**options).evaluate(model, batches)


@pytest.mark.parametrize("sizes", [[12], [5, 7], [1] * 12])
def test_metrics_are_torchmetrics(sizes):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(12, 3, 16, 20, generator=generator)
    masks = torch.randint(0, 5, (12, 16, 20), generator=generator).to(torch.uint8)
    masks[masks == 3] = 1  # in no mask, but predicted
    masks[torch.rand(masks.shape, generator=generator) < 0.2] = IGNORE
    model = Segmentation().wrap(vit(), 6).eval()
    nn.init.constant_(model.decoder.head.bias[5:].data, -100)  # neither there nor predicted
    nn.init.normal_(model.decoder.head.weight, generator=generator)
    outcome = evaluated(sizes, model, images, masks)

    windows = Windows((16, 16), (10, 10))
    with torch.inference_mode():
        predicted = torch.stack([p.argmax(0) for p in windows.probabilities(model, images, [(16, 20)] * 12, 12)])
    options = {"num_classes": 6, "ignore_index": IGNORE}
    jaccard, accuracy = MulticlassJaccardIndex(**options), MulticlassAccuracy(**options, average="micro")
    labels = masks.long()
    assert len(predicted.unique()) > 2
    assert outcome.metrics["miou"] == pytest.approx(jaccard(predicted, labels).item(), abs=1e-6)
    assert outcome.metrics["pixel_accuracy"] == pytest.approx(accuracy(predicted, labels).item(), abs=1e-6)
    per_class = MulticlassJaccardIndex(**options, average="none")(predicted, labels)
    assert outcome.detail["iou"][:5] == pytest.approx(per_class[:5].tolist(), abs=1e-6)
    assert outcome.detail["iou"][5] is None
    for name in ("image_miou", "pixel_accuracy"):
        assert outcome.per_image[name].mean() == pytest.approx(outcome.metrics[name])
    first = MulticlassJaccardIndex(**options, average="none")(predicted[:1], labels[:1])
    assert outcome.per_image["image_miou"][0] == pytest.approx(first[labels[0].unique()[:-1]].mean().item(), abs=1e-6)


def test_examples_are_spread_over_the_images():
    images, masks = torch.zeros(11, 3, 16, 20), torch.zeros(11, 16, 20, dtype=torch.uint8)
    masks[:, :4] = IGNORE
    outcome = evaluated([4, 7], Segmentation().wrap(vit(), 3).eval(), images, masks, image_mean=(0.2,), std=(0.5,))
    with pytest.raises(UserError, match="is empty"):
        Segmentation().evaluate(vit(), [])
    assert [example.index for example in outcome.examples] == [0, 4, 6, 10]
    panels = outcome.examples[0].panels
    assert list(panels) == ["image", "annotation", "prediction"]
    assert (panels["image"] == 51).all()
    assert (panels["annotation"][:3] == 51).all(), "ignored pixels are not colored"
    assert {panel.shape for panel in panels.values()} == {(16, 20, 3)}


def test_the_loss_is_the_mean_over_labelled_pixels_also_in_parts():
    torch.manual_seed(0)
    logits, masks = torch.randn(4, 3, 6, 6), torch.randint(0, 3, (4, 6, 6))
    masks[0, :5] = masks[3] = IGNORE
    task, expected = Segmentation(label_smoothing=0.1), F.cross_entropy(
        logits, masks, ignore_index=IGNORE, label_smoothing=0.1
    )  # fmt: skip
    loss, statistics = task.loss(lambda x: x, Batch(logits, masks, torch.arange(4)))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    right = (logits.argmax(1) == masks)[masks != IGNORE].float().mean()
    assert statistics["pixel_accuracy"].item() == pytest.approx(right.item(), rel=1e-6)
    pixels = ((masks != IGNORE).sum() / 4).expand(4)
    parts = Batch(logits, (masks, pixels), torch.arange(4)).parts(3)
    assert sum(len(part) / 4 * task.loss(lambda x: x, part)[0] for part in parts).item() == pytest.approx(loss.item())
    nothing = Batch(logits, torch.full_like(masks, IGNORE), torch.arange(4))
    assert task.loss(lambda x: x, nothing)[0].item() == 0


def test_predictions_name_classes_by_their_pixels_in_colors_that_are_stable_and_differ():
    labels, names = torch.tensor([[0, 0, 2, 2], [2, 2, 2, 1]], dtype=torch.uint8), ("sky", "car", "road")
    (row,) = Segmentation().predictions([labels], names, top=2)
    assert (row["predicted"], row["pixels"]) == (["road", "sky", "car"], {"road": 0.625, "sky": 0.25})
    drawn = Segmentation().draw(np.zeros((2, 4, 3), np.uint8), row, names)
    assert len(np.unique(drawn.reshape(-1, 3), axis=0)) > 2
    assert (palette(11) == palette(150)[:11]).all()
    assert len(np.unique(palette(30), axis=0)) == 30
    assert Segmentation().legend(("a", "b")) == {"a": "#e69f00", "b": "#56b4e9"}
    flat = overlay(np.full((2, 2, 3), 100, np.uint8), np.full((2, 2), 1, np.uint8))
    assert (flat == (0.4 * 100 + 0.6 * palette(2)[1]).astype(np.uint8)).all()


def test_recipes_and_strides_that_are_refused():
    recipe = small_segmentation()
    assert make_task("segmentation", recipe).part.eval_scales == (1.0,)
    for task, wrong, words in (
        ("segmentation", recipe.with_(mixup=0.2), "segmentation does not read mixup"),
        ("segmentation", default(), "segmentation does not read crop of the recipe"),
        ("classification", recipe, "classification does not read resize_range"),
    ):
        with pytest.raises(UserError, match=words):
            make_task(task, wrong)
    fitted = TASKS["segmentation"].fitted(default().with_(loss="sigmoid", flip=0.3))
    assert make_task("segmentation", fitted)
    assert fitted.augment.flip == 0.3
    for wrong in ({"eval_scales": ()}, {"resize_range": (2.0, 0.5)}, {"window_stride": 0}, {"most_of_class": 0}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            recipe.with_(**wrong)
    recipe = small_segmentation().with_(window_stride=17)
    assert make_task("segmentation", recipe).check_size((17, 20)) is None
    with pytest.raises(UserError, match=r"window_stride=17 leaves pixels between windows of 16 x 32 unseen: .* 16"):
        vm.Study("mu2/4", ["dpn"], data="digits", task="segmentation", img_size=(16, 32), recipe=recipe)


def test_ade20k_is_the_papers_listing():
    recipe = ade20k()
    expected = {"epochs": 128, "batch_size": 16, "optimizer": "adamw", "lr": 3e-5, "weight_decay": 0.01}
    expected |= {"drop_path": 0.1, "clip_norm": None, "label_smoothing": 0, "window_stride": 341, "final_norm": False}
    assert {name: value for name, value in recipe.settings().items() if name in expected} == expected
    assert Segmentation.from_recipe(recipe).part.window_stride == 341
