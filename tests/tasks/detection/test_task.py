"""Detectors against torchvision's own, their losses and metrics by hand, on every kind of backbone."""

import contextlib
import io
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from pycocotools import mask as coco_masks
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import nn
from torchvision.models.detection import MaskRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from transformers import PvtConfig, PvtForImageClassification

import vitmods as vm
from vitmods.adapters.replace import replace_norms
from vitmods.data import Batch
from vitmods.recipes import Recipe, coco_1x, default, small_detection
from vitmods.recipes.schedule import lr_at, resolve
from vitmods.tasks import Detection, InstanceSegmentation
from vitmods.tasks.base import make_task
from vitmods.tasks.detection.heads import MaskRCNNDetector, RetinaNetDetector, padded_maps
from vitmods.tasks.detection.metrics import NAMES, AveragePrecision, image_ap50
from vitmods.tasks.detection.objects import Objects
from vitmods.tasks.features import _positions, feature_maps, without_head
from vitmods.util.errors import UserError

SIZE = (64, 96)  # of the padded images


def pyramid():
    torch.manual_seed(0)
    return timm.create_model(
        "pvt_v2_b0", num_classes=0, embed_dims=(8, 16, 24, 32), num_heads=(1, 2, 3, 4), depths=(1, 1, 1, 1)
    )


def pvt(side=64):
    torch.manual_seed(0)
    small = {"hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1, 2, 3, 4], "mlp_ratios": [2, 2, 2, 2]}
    return PvtForImageClassification(PvtConfig(image_size=side, num_labels=4, depths=[1, 1, 1, 1], **small))


def plain():
    torch.manual_seed(0)
    return without_head(vm.vit("mu2/16", img_size=64, num_classes=3, reg_tokens=2))


def target(boxes, labels, size=SIZE, native=(128, 192)):
    boxes = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    rows, columns = torch.arange(SIZE[0])[None, :, None], torch.arange(SIZE[1])[None, None]
    left, top, right, bottom = (boxes[:, i, None, None] for i in range(4))
    masks = ((rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)).to(torch.uint8)
    return {"boxes": boxes, "labels": torch.tensor(labels), "masks": masks, "size": size, "native": native}


TARGETS = [target([[4, 4, 40, 36], [50, 10, 90, 60]], [0, 2]), target([], [], size=(64, 64), native=(64, 64))]
TARGETS[1]["labels"] = torch.zeros(0, dtype=torch.int64)
IMAGES = torch.randn(2, 3, *SIZE, generator=torch.Generator().manual_seed(1))


class Whole(nn.Module):
    """A detector's backbone and neck as torchvision's models want them."""

    def __init__(self, model, channels):
        super().__init__()
        self.model, self.out_channels = model, channels

    def forward(self, images):
        return OrderedDict(self.model.neck(padded_maps(self.model.backbone, images)))


def torchvisions(model, channels):
    """torchvision's own model with the same modules, which takes images as they are."""
    values, backbone = model.detector, Whole(model, channels)
    if isinstance(model, RetinaNetDetector):
        other = RetinaNet(backbone, 3, head=values.head, detections_per_img=100)
    else:
        anchors = AnchorGenerator(tuple((side,) for side in (32, 64, 128, 256, 512)), ((0.5, 1.0, 2.0),) * 5)
        other = MaskRCNN(backbone, 4, rpn_anchor_generator=anchors)
        other.rpn, other.roi_heads = values.rpn, values.roi_heads
    other.transform = GeneralizedRCNNTransform(1, 1, [0.0] * 3, [1.0] * 3, _skip_resize=True)
    other.transform.resize = lambda image, target=None: (image, target)
    return other


def few(model):
    """Fewer proposals: the same sums in a tenth of the time."""
    if isinstance(model, MaskRCNNDetector):
        rpn, heads = model.detector.rpn, model.detector.roi_heads
        rpn._pre_nms_top_n = rpn._post_nms_top_n = {"training": 20, "testing": 8}
        heads.fg_bg_sampler.batch_size_per_image, heads.detections_per_img = 8, 3
    return model


def detector(kind, backbone, channels=16):
    torch.manual_seed(0)
    model = few(kind(backbone, 3, channels))
    head = model.detector.head.classification_head.cls_logits if kind is RetinaNetDetector else None
    if head is not None:
        nn.init.constant_(head.bias, -1.0)  # or nothing would be detected
    return model


@pytest.mark.parametrize("kind", [RetinaNetDetector, MaskRCNNDetector])
def test_losses_and_detections_are_torchvisions(kind):
    model = detector(kind, pyramid())
    other, shift = torchvisions(model, 16), int(kind is MaskRCNNDetector)
    images = [image[:, : row["size"][0], : row["size"][1]] for image, row in zip(IMAGES, TARGETS)]
    padded = torch.zeros_like(IMAGES)
    for padded_image, image in zip(padded, images):
        padded_image[:, : image.shape[1], : image.shape[2]] = image
    annotated = [{**row, "labels": row["labels"] + shift} for row in TARGETS]
    torch.manual_seed(5)
    actual = model.train()(padded, TARGETS)
    torch.manual_seed(5)
    reference = other.train()(images, annotated)
    assert sorted(value.item() for value in actual.values()) == pytest.approx(
        sorted(v.item() for v in reference.values())
    )
    model.eval()
    other.eval()
    with torch.no_grad():
        expected = other(images)
        detected = model.detect(padded, [{**row, "native": row["size"]} for row in TARGETS])
    assert len(detected[0]["boxes"]) > 0
    for row, same in zip(detected, expected):
        torch.testing.assert_close(row["boxes"], same["boxes"])
        torch.testing.assert_close(row["scores"], same["scores"])
        assert torch.equal(row["labels"] + shift, same["labels"])
        if shift:
            assert torch.equal(row["masks"], same["masks"][:, 0] > 0.5)


@pytest.mark.parametrize("kind", [RetinaNetDetector, MaskRCNNDetector])
def test_an_evaluation_has_the_loss_and_leaves_everything_as_it_was(kind):
    model = detector(kind, pyramid()).eval()
    state, before = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    with torch.inference_mode():
        losses, detected = model.measure(IMAGES, TARGETS)
        again, _ = model.measure(IMAGES, TARGETS)
    assert losses == again
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    if kind is RetinaNetDetector:  # nothing is drawn: the very loss of training
        trained = model.train()(IMAGES, TARGETS)
        assert {k: v.item() for k, v in trained.items()} == pytest.approx({k: v.item() for k, v in losses.items()})
    halves = [row["boxes"] / torch.tensor([192, 128, 192, 128.0]) for row in detected[:1]]
    assert (halves[0] <= 1).all()
    assert detected[0]["boxes"].max() > 96  # in pixels of the file, twice those of the view


BACKBONES = {
    "plain ViT": plain,
    "PVT of Hugging Face with DTN": lambda: without_head(replace_norms(pvt(), vm.DynamicTokenNorm()).model),
    "PVT v2 with RMSNorm": lambda: replace_norms(pyramid(), vm.Norm("rms", exact=False)).model,
    "plain ViT with DTN": lambda: without_head(vm.apply(vm.vit("mu2/16", img_size=64), vm.DynamicTokenNorm())),
}


@pytest.mark.parametrize("name", BACKBONES)
def test_every_parameter_of_every_backbone_is_trained_on_images_of_any_size(name):
    made = (InstanceSegmentation if name == "plain ViT with DTN" else Detection)(fpn_channels=16)
    backbone = BACKBONES[name]()
    torch.manual_seed(0)
    model = few(made.wrap(backbone, 3)).train()
    loss, parts = made.loss(model, Batch(IMAGES, TARGETS, torch.arange(2)))
    assert loss.item() == pytest.approx(sum(part.item() for part in parts.values()), rel=1e-5)
    loss.backward()
    assert [name for name, value in model.named_parameters() if value.grad is None] == []
    with torch.inference_mode():
        detected = model.eval()(torch.randn(1, 3, 33, 130))  # no multiple of any stride
    assert detected[0]["boxes"].shape[1] == 4


def test_maps_of_hugging_faces_pvt_are_its_own_with_positions_resampled_not_reshaped():
    model, images = pvt().eval(), torch.randn(2, 3, 64, 64)
    stem = model.pvt.encoder.patch_embeddings[0]
    ramp = torch.linspace(0, 1, 16)[:, None].expand(16, 16)  # grows with the row
    with torch.no_grad():
        maps, reference = feature_maps(model, images), model.pvt(images, output_hidden_states=True)
        stem.position_embeddings.copy_(ramp.reshape(1, -1, 1).expand(1, 256, 8))
        small, large = (_positions(stem, rows, 16).detach()[0, :, 0].unflatten(0, (rows, 16)) for rows in (16, 24))
    assert [tuple(row.shape[1:]) for row in maps] == [(8, 16, 16), (16, 8, 8), (24, 4, 4), (32, 2, 2)]
    torch.testing.assert_close(maps[-1].flatten(2).mT, reference.last_hidden_state[:, 1:])
    torch.testing.assert_close(maps[1].flatten(2).mT, reference.hidden_states[1])
    np.testing.assert_allclose(large[[0, -1], 0], small[[0, -1], 0], atol=1e-6)
    assert (large.diff(dim=0) >= 0).all()


def truth(boxes, labels, crowd=None, size=(100, 100)):
    boxes = np.array(boxes, dtype=np.float32).reshape(-1, 4)
    sides = boxes[:, 2:] - boxes[:, :2]
    flags = np.array(crowd if crowd is not None else [False] * len(labels), dtype=bool)
    return Objects(boxes, np.array(labels, dtype=np.int64), flags, sides.prod(axis=1), size)


def detections(boxes, labels, scores):
    return {
        "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        "labels": torch.tensor(labels, dtype=torch.int64),
        "scores": torch.tensor(scores, dtype=torch.float32),
    }


SIDE = 120  # of random images


def random_case(seed, masks):
    """Pairs of detections and objects: shifted, missed, invented and repeated boxes, equal scores, crowds."""
    rng = np.random.default_rng(seed)
    classes, pairs = int(rng.integers(1, 4)), []
    for _ in range(rng.integers(1, 6)):
        corners = rng.uniform(0, SIDE - 10, (rng.integers(0, 9), 2))
        sides = rng.uniform(4, SIDE, corners.shape)
        boxes = np.concatenate([corners, np.minimum(corners + sides, SIDE)], axis=1).round(2)
        labels = rng.integers(0, classes, len(boxes))
        outlines = tuple([[x, y, right, y, right, bottom, x, bottom]] for x, y, right, bottom in boxes.tolist())
        annotated = replace(truth(boxes, labels, rng.random(len(boxes)) < 0.1, size=(SIDE, SIDE)), segments=outlines)
        chosen = rng.integers(0, len(boxes), rng.integers(0, 15)) if len(boxes) else []
        moved = boxes[chosen] + rng.normal(0, rng.choice([0, 2, 8]), (len(chosen), 4))
        moved = np.concatenate([moved, rng.uniform(0, SIDE, (3, 4))])
        moved = np.concatenate([np.minimum(moved[:, :2], moved[:, 2:]), np.maximum(moved[:, :2], moved[:, 2:])], axis=1)
        kinds = np.concatenate([labels[chosen], rng.integers(0, classes, 3)])
        row = detections(moved.tolist(), kinds.tolist(), rng.random(len(moved)).round(rng.integers(1, 4)).tolist())
        if masks:
            rows, columns = np.arange(SIDE)[:, None], np.arange(SIDE)
            inside = [(rows >= y) & (rows < b) & (columns >= x) & (columns < r) for x, y, r, b in moved]
            row["masks"] = torch.from_numpy(np.array(inside))
        pairs.append((row, annotated))
    return classes, pairs


def pycocotools(classes, pairs, kind):
    """The six average precisions of COCO's own code; -1 where nothing is of that size."""

    def record(image, label, box, mask):
        left, top, right, bottom = box.tolist()
        place = {"bbox": [left, top, right - left, bottom - top], "area": (right - left) * (bottom - top)}
        if mask is not None:
            runs = coco_masks.encode(np.asfortranarray(np.asarray(mask).astype(np.uint8)))
            place |= {"segmentation": runs, "area": float(coco_masks.area(runs))}
        return {"image_id": image, "category_id": int(label), "iscrowd": 0, **place}

    annotations, detected = [], []
    for image, (row, known) in enumerate(pairs):
        for i, (label, box, mask) in enumerate(zip(known.labels, known.boxes, known.masks(), strict=True)):
            facts = {"iscrowd": int(known.crowd[i]), "area": float(known.area[i])}
            annotations.append({**record(image, label, box, mask), **facts})
        masks = row["masks"] if kind == "segm" else [None] * len(row["labels"])
        for label, box, mask, score in zip(row["labels"], row["boxes"], masks, row["scores"], strict=True):
            detected.append({**record(image, label, box, mask), "score": float(score)})
    images = [{"id": i, "height": SIDE, "width": SIDE} for i in range(len(pairs))]
    categories = [{"id": label, "name": str(label)} for label in range(classes)]
    with contextlib.redirect_stdout(io.StringIO()):
        both = []
        for records in (annotations, detected):
            numbered = [{"segmentation": [[0.0] * 6], **one, "id": i} for i, one in enumerate(records, start=1)]
            both.append(COCO())
            both[-1].dataset = {"images": images, "annotations": numbered, "categories": categories}
            both[-1].createIndex()
        evaluation = COCOeval(*both, kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return dict(zip(NAMES, evaluation.stats[:6], strict=True))


@pytest.mark.parametrize("cases", [range(12), pytest.param(range(12, 500), marks=pytest.mark.long)])
def test_average_precision_is_that_of_pycocotools(cases):
    compared = 0
    for seed in cases:
        masks = seed % 4 == 3
        classes, pairs = random_case(seed, masks)
        if all(annotated.crowd.all() for _, annotated in pairs):
            continue  # without objects COCO's code gives -1, ours 0
        metric = AveragePrecision(masks)
        for row, annotated in pairs:
            metric.add(row, annotated)
        actual = metric.result()
        for prefix, kind in (("", "bbox"), ("mask_", "segm"))[: 1 + masks]:
            for name, value in pycocotools(classes, pairs, kind).items():
                assert actual.get(f"{prefix}{name}", -1) == pytest.approx(value, abs=1e-6), (seed, prefix, name)
                compared += value > 0
    assert compared > 3 * len(cases)


def measured(detected, known):
    metric = AveragePrecision(masks=False)
    metric.add(detections(*detected), truth(*known))
    return metric


def test_average_precision_of_each_class_without_crowds():
    boxes = [[0, 0, 40, 40], [50, 50, 90, 90], [0, 50, 40, 90]]
    metric = measured(([*boxes[:2], [0, 0, 9, 9]], [0, 2, 1], [0.9, 0.8, 0.7]), (boxes, [0, 2, 2]))
    assert metric.of_classes(4) == {"ap": pytest.approx([1.0, None, 51 / 101, None])}
    assert metric.result()["ap"] == pytest.approx((1 + 51 / 101) / 2)
    assert AveragePrecision(masks=True).of_classes(2) == {"ap": [None, None], "mask_ap": [None, None]}
    crowd = [[0, 0, 40, 40], [50, 0, 100, 100]], [0, 0], [False, True]
    assert measured(([[60, 10, 80, 30], [0, 0, 40, 40]], [0, 0], [0.9, 0.8]), crowd).result()["ap50"] == 1
    nothing = ([], [], [])
    assert measured(nothing, ([], [])).result() == {"ap": 0, "ap50": 0, "ap75": 0}
    assert measured(nothing, ([[0, 0, 40, 40]], [1])).result()["ap"] == 0


@pytest.mark.parametrize(
    ("detected", "known", "expected"),
    [
        (([[0, 0, 40, 40]], [0], [0.9]), ([[0, 0, 40, 40]], [0]), 1.0),
        (([[0, 0, 40, 40]], [1], [0.9]), ([[0, 0, 40, 40]], [0]), 0.0),
        (([[60, 60, 90, 90], [0, 0, 40, 40]], [0, 0], [0.9, 0.8]), ([[0, 0, 40, 40]], [0]), 0.5),
        (([[0, 0, 40, 40], [0, 0, 41, 40]], [0, 0], [0.9, 0.8]), ([[0, 0, 40, 40], [50, 50, 90, 90]], [0, 0]), 0.5),
        (([], [], []), ([[0, 0, 40, 40]], [0]), 0.0),
        (([], [], []), ([], []), 1.0),
        (([[0, 0, 40, 40]], [0], [0.75]), ([], []), 0.25),
        (([[0, 0, 20, 20], [50, 50, 90, 90]], [0, 1], [0.9, 0.8]),
         ([[0, 0, 40, 40], [50, 50, 90, 90]], [0, 1], [True, False]), 1.0),
    ],
)  # fmt: skip
def test_the_score_of_an_image_by_hand(detected, known, expected):
    assert image_ap50(detections(*detected), truth(*known)) == pytest.approx(expected)


def batches(task, count=3):
    for i in range(count):
        segments = ([[8.0, 8, 80, 8, 80, 72, 8, 72]],)
        annotated = replace(truth([[8, 8, 80, 72]], [i % 3], size=(128, 192)), segments=segments)
        row = {**target([[4, 4, 40, 36]], [i % 3]), "truth": annotated}
        yield Batch(IMAGES[:1], [row], torch.tensor([i]))


@pytest.mark.parametrize("kind", [Detection, InstanceSegmentation])
def test_an_evaluation_gives_metrics_scores_of_images_and_pictures(kind):
    task = kind(fpn_channels=16)
    torch.manual_seed(0)
    detected = task.evaluate(few(task.wrap(pyramid(), 3)).eval(), batches(task))
    names = {metric.name for metric in task.metrics if "_large" not in metric.name and "_small" not in metric.name}
    assert names | {"loss"} == set(detected.metrics) - {"ap_large", "mask_ap_large"}
    assert detected.per_image["image_ap50"].mean() == pytest.approx(detected.metrics["image_ap50"])
    assert detected.per_image["objects"].tolist() == [1, 1, 1]
    assert [example.index for example in detected.examples] == [0, 1, 2]
    panels = detected.examples[0].panels
    assert {name: panel.shape for name, panel in panels.items()} == dict.fromkeys(
        ("image", "annotation", "prediction"), (64, 96, 3)
    )
    assert (panels["annotation"] != panels["image"]).any()
    with pytest.raises(UserError, match="is empty"):
        task.evaluate(task.wrap(pyramid(), 3).eval(), [])


def test_predictions_name_objects_in_pixels_of_the_file_and_are_drawn():
    task, classes = InstanceSegmentation(fpn_channels=16), ("cat", "dog", "cow")
    mask = torch.zeros(1, 50, 60, dtype=torch.bool)
    mask[0, 10:30, 5:25] = True
    (row,) = task.predictions([{**detections([[5, 10, 25, 30]], [1], [0.8]), "masks": mask}], classes)
    assert (row["predicted"], list(row["probabilities"])) == (["dog"], ["dog"])
    assert row["objects"][0]["box"] == [5, 10, 25, 30]
    image = np.zeros((50, 60, 3), dtype=np.uint8)
    drawn = task.draw(image, row, classes)
    assert (drawn.shape, drawn.dtype) == (image.shape, image.dtype)
    assert [bool(part.any()) for part in (drawn[20, 15], drawn[45, 50], image)] == [True, False, False]
    annotated = truth([[5, 10, 25, 30]], [1], size=(50, 60))
    assert task.draw(image, annotated, classes)[10:30, 5:25].any()
    assert Detection().predictions([detections([], [], [])], classes) == [
        {"predicted": [], "probabilities": {}, "objects": []}
    ]


def test_recipes_of_detectors_and_backbones_that_do_not_suit():
    for make, message in (
        (lambda: make_task("detection", Recipe().with_(mixup=0.2)), "detection does not read mixup"),
        (lambda: make_task("classification", Recipe().with_(fpn_channels=128)), "does not read fpn_channels"),
        (lambda: Detection().wrap(nn.Linear(2, 2), 3), "does not give feature maps"),
        (lambda: Detection().wrap(timm.create_model("levit_128s", num_classes=0), 3), r"strides .*\(4, 8, 16, 32\)"),
    ):
        with pytest.raises(UserError, match=message):
            make()
    fitted = Detection.fitted(default())
    assert make_task("detection", fitted.with_(fpn_channels=128)).fpn_channels == 128
    assert make_task("detection", coco_1x()).norm is None
    assert make_task("detection", small_detection()).norm is not None
    for norm, count in (("none", 0), ("group", 4 + 4 + 4)):  # laterals, outputs, and four layers of the mask head
        task = make_task("instance_segmentation", small_detection().with_(detector_norm=norm, fpn_channels=16))
        assert sum(isinstance(module, nn.GroupNorm) for module in task.wrap(pyramid(), 3).modules()) == count


def test_coco_1x_falls_to_a_tenth_at_epochs_8_and_11_of_12():
    length, per_epoch = resolve(coco_1x(), 118_287), 118_287 // 16
    assert (length.steps, length.warmup_steps) == (12 * per_epoch, 500)
    steps = (0, 250, 8 * per_epoch - 1, 8 * per_epoch, 11 * per_epoch - 1, 11 * per_epoch)
    expected = (1e-7, (1e-7 + 1e-4) / 2, 1e-4, 1e-5, 1e-5, 1e-6)
    assert [lr_at(length, step) for step in steps] == pytest.approx(expected, rel=1e-6)
    assert coco_1x(masks=True).optimizer.lr == 2e-4
    with pytest.raises(UserError, match="step_at must be increasing"):
        Recipe().with_(step_at=(0.9, 0.5))
