"""Every figure: its numbers where they are known beforehand, and an image that is not empty."""

import csv
import io
import json
import math

import numpy as np
import pytest
import timm
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from torch import nn

import vitmods as vm
from vitmods import analysis as va
from vitmods.analysis.figure import note_missing
from vitmods.analysis.figures.norms import subtracted_mean
from vitmods.analysis.gallery import alternative
from vitmods.layers.norms import NORMS
from vitmods.layers.stems import patchify
from vitmods.model.flops import count_macs

GRID = (3, 5)


def build(changes="", **overrides):
    torch.manual_seed(0)
    model = vm.vit("mu3/4", **({"img_size": (12, 20), "num_classes": 5} | overrides))
    return (vm.apply(model, *vm.parse_changes(changes)) if changes else model).eval()


def images(count=3):
    return torch.randn(count, 3, 12, 20, generator=torch.Generator().manual_seed(1))


def rows(changed=1.0):
    """Of a log: 20 steps in rows of 5, with gradients of known means, and lambdas at two evaluations."""
    log = []
    for k in range(4):
        norms = {"stem": 10.0 - k, "blocks.0": changed, "blocks.1": 2 * changed, "head": 0.5}
        norms = {f"gradient/{name}": value for name, value in norms.items()}
        log.append({"step": 5 * (k + 1), "epoch": float(k + 1), "split": "train", "loss": 1.0, **norms})
        if k % 2:
            heads = {f"{what} blocks.0.norm1": [0.1 * k, 0.9] for what in ("mean", "variance")}
            log.append({"step": 5 * (k + 1), "epoch": float(k + 1), "split": "record", "lambda": heads})
    return log


def examined(name="base", changes="", **facts):
    model = build(changes)
    inputs = {"start": build(changes), "images": images(), "record": rows(), "score": 80.0, "seconds": 0.1}
    return va.Examined(name, model, config=json.loads(model.vit_config.to_json()), **(inputs | facts))


# ---- gradients


def test_gradients_are_means_over_the_last_steps():
    values = va.gradients_by_depth(rows(), last=10)
    means = {"stem": 7.5, "blocks.0": 1.0, "blocks.1": 2.0, "head": 0.5}
    assert [(name, float(v)) for name, v in values.items()] == list(means.items())
    assert float(va.gradients_by_depth(rows(), last=7)["stem"]) == pytest.approx((5 * 7 + 2 * 8) / 7)
    assert float(va.gradients_by_depth(rows())["stem"]) == 7  # the last tenth lies in the last row
    over = va.stem_gradient(rows())
    assert (over["stem"].tolist(), over["step"].tolist()) == ([10, 9, 8, 7], [5, 10, 15, 20])
    with pytest.raises(va.NotHere, match="--record gradients"):
        va.gradients_by_depth([{"step": 1, "loss": 1.0}])
    with pytest.raises(va.NotHere, match="--record lambdas"):
        va.trade_offs_over_training(rows()[:1])


def test_gradients_of_models_of_different_depth_share_no_layer():
    """Each has its own blocks between the stem and the head, at their part of the depth; frozen ones leave a gap."""

    def norms(*blocks):
        return {name: torch.tensor(1.0) for name in ("stem", *(f"blocks.{k}" for k in blocks), "head")}

    def drawn(**values):
        (axes,) = va.FIGURES["gradients"].draw(values).axes
        return [line.get_xdata() for line in axes.lines], [label.get_text() for label in axes.get_xticklabels()]

    lines, labels = drawn(deep=norms(0, 1, 2, 3), flat=norms(0, 1))
    assert [list(line) for line in lines] == [[0, 1, 2, 3, 4, 5], [0, 1.5, 3.5, 5]]
    assert labels == ["stem", "25 %", "50 %", "75 %", "head"]
    lines, labels = drawn(one=norms(0, 1, 2, 3), tuned=norms(2, 3))
    assert [list(line) for line in lines] == [[0, 1, 2, 3, 4, 5], [0, 3, 4, 5]]
    assert labels == ["stem", "1", "2", "3", "4", "head"]


def test_blocks_that_are_not_trained_keep_their_place():
    """Of a model whose last blocks, or all, are frozen the others are not stretched over the depth."""

    def one(name, *blocks):
        layers = ("stem", *(f"blocks.{k}" for k in blocks), "head")
        return va.Examined(
            name, head=True, record=[{"step": 1, **{f"gradient/{layer}": 1.0 for layer in layers}}], config={"depth": 4}
        )

    kind = va.FIGURES["gradients"]
    values, why = kind.of(one("full", 0, 1, 2, 3), one("first two", 0, 1), one("head"))
    assert not why
    (axes,) = kind.draw(values).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["stem", "1", "2", "3", "4", "head"]
    for line in axes.lines:
        assert list(line.get_xdata()) == [0, 1, 2, 3, 4, 5]
    assert torch.tensor(axes.lines[1].get_ydata()).isnan().tolist() == [False] * 3 + [True, True] + [False]
    assert "nan" not in alternative(kind, values)


# ---- the first norm


@pytest.mark.parametrize(("patch", "channels"), [((4, 4), 3), ((2, 5), 3), ((4, 4), 1)])
def test_planted_scales_are_the_image(patch, channels):
    model = vm.apply(vm.vit("mu/4", img_size=(8, 20), patch_size=patch, in_chans=channels), vm.DualPatchNorm())
    planted = torch.arange(float(channels * patch[0] * patch[1])).reshape(channels, *patch)
    before = model.patch_embed.norm_before
    before.weight.data = planted.flatten()
    torch.testing.assert_close(va.first_norm_scales(model), planted)
    # the value of a pixel goes to its place: an image that is zero but there
    pixel = torch.zeros(1, channels, 8, 20)
    pixel[0, -1, 1, 0] = 1
    before.bias.data.zero_()
    place = before(patchify(pixel, patch))[0, 0].argmax()
    assert place == (channels - 1) * patch[0] * patch[1] + patch[1]


# ---- tokens


def planted_tokens(model, tokens):
    """The model with a stem that gives these tokens (T, C), without positions."""
    model.patch_embed.forward = lambda x, keep=None: tokens[None].expand(len(x), -1, -1)
    model.pos_embed.data.zero_()
    return model


def test_magnitudes_of_planted_tokens():
    """Two heads, the second of which holds nothing; LayerNorm makes tokens equally large."""
    model = build(num_heads=2)
    tokens = torch.zeros(15, 32)
    tokens[:, :16] = torch.randn(15, 16, generator=torch.Generator().manual_seed(2)) * torch.arange(1.0, 16)[:, None]
    values = va.token_magnitudes(planted_tokens(model, tokens), images())
    torch.testing.assert_close(values["before"][0], tokens[:, :16].norm(dim=-1).reshape(GRID))
    assert not values["before"][1].any()
    complete = values["after"].square().sum(0).sqrt()
    torch.testing.assert_close(complete, torch.full(GRID, math.sqrt(32)), rtol=1e-4, atol=0)


def test_another_block_and_a_model_without_norms():
    model = build()
    assert not torch.equal(
        va.token_magnitudes(model, images(), 2)["before"], va.token_magnitudes(model, images())["before"]
    )
    with pytest.raises(va.NotHere, match="one of 1 to 3"):
        va.token_magnitudes(model, images(), 3)
    with pytest.raises(va.NotHere, match="block 1 does not have a norm"):
        va.token_magnitudes(build("placement(attn=post,mlp=post)"), images())


def test_components_are_those_of_a_known_plane():
    """Points in a plane of 5 dimensions keep their distances; the first component is the long side."""
    flat = torch.randn(40, 2, dtype=torch.float64) * torch.tensor([3.0, 1.0])
    basis = torch.linalg.qr(torch.randn(5, 2, dtype=torch.float64)).Q
    values, explained = va.principal_components(flat @ basis.T + 7)
    variances = torch.linalg.eigvalsh(torch.cov(flat.T)).flip(0)
    torch.testing.assert_close(explained, variances / variances.sum())
    torch.testing.assert_close(torch.cdist(values, values), torch.cdist(flat, flat))
    assert values[:, 0].var() > 4 * values[:, 1].var()
    assert (values.gather(0, values.abs().argmax(0, keepdim=True)) > 0).all()
    with pytest.raises(va.NotHere, match="two tokens"):
        va.principal_components(flat[:1])


def test_components_are_by_head_and_there_may_be_no_first_norm():
    values = va.token_components(build("dtn(blocks=1)"), images())
    assert values["before"].shape == values["after"].shape == (2, 15, 2)
    assert values["explained after"].shape == (2, 1, 2)
    table = va.FIGURES["token_pca"].csv({"x": values}).splitlines()
    assert f"x,explained before,2,,1,{values['explained before'][1, 0, 0]:.6g}" in table
    assert values["after"].mean(1).abs().max() < 1e-6
    for changes in ("", "dpn(before=false)", "dpn(norm=no_learnable)"):
        with pytest.raises(va.NotHere, match="apply dpn"):
            va.first_norm_scales(build(changes))


@pytest.mark.parametrize("kind", ["layer", "instance", "batch", "group", "switchable", "dynamic_token"])
def test_a_norm_takes_this_mean_away(kind):
    """The norm of x without it is the norm of x without its mean: what is left has no mean of that kind."""
    torch.manual_seed(0)
    norm = NORMS[kind].factory(1e-6, True, {}, num_heads=4, grid_size=GRID, prefix_tokens=2)(8).eval()
    if kind == "batch":
        norm.running_mean.normal_()
    x = torch.randn(2, 17, 8) + 3
    mean = subtracted_mean(norm, x.double()).float()
    # a norm is gain * (x - mean) / deviation + shift: it is its shift where x is its own mean
    ratio = (norm(x) - norm.bias) / (x - mean)
    assert (ratio > 0).all()
    if kind in ("layer", "instance"):
        first = ratio[..., :1] if kind == "layer" else ratio[:, :1]
        torch.testing.assert_close(ratio, first.expand_as(ratio), rtol=1e-3, atol=1e-3)
    if kind == "layer":
        torch.testing.assert_close(mean, x.mean(-1, keepdim=True))


def slow_variation(x, mean):
    """The trimmed norm of |(x - mean) / x| of one token by sqrt(C), channel by channel."""
    ratios = sorted(abs((value - m) / value) for value, m in zip(x, mean))
    kept = ratios[: len(ratios) - math.ceil(0.05 * len(ratios))]
    return math.sqrt(sum(ratio**2 for ratio in kept) / len(kept))


@pytest.mark.parametrize("changes", ["", "instancenorm"])
def test_variation_is_the_trimmed_norm_of_a_token(changes):
    """Token by token; a value of almost zero, whose ratio is huge, does not count."""
    tokens = torch.randn(15, 32, generator=torch.Generator().manual_seed(3)) + 0.5
    tokens[:, 0] = 1e-6
    model = planted_tokens(build(changes, class_token=False, pool="avg") if changes else build(), tokens)
    values = va.variation_coefficient(model, images())
    assert values["quantile"].tolist() == [0.25, 0.5, 0.75]
    assert [name for name in values if name != "quantile"] == [f"blocks.{i}.norm1" for i in range(3)]
    x = tokens.double()
    means = (x.mean(0, keepdim=True) if changes else x.mean(1, keepdim=True)).expand_as(x)
    each = sorted(slow_variation(*pair) for pair in zip(x.tolist(), means.tolist()) for _ in range(3))
    expected = [each[round(q * (len(each) - 1))] for q in (0.25, 0.5, 0.75)]
    assert values["blocks.0.norm1"].tolist() == pytest.approx(expected, rel=1e-4)
    assert max(expected) < 100


def test_a_norm_without_a_mean_does_not_have_the_variation():
    with pytest.raises(va.NotHere, match="does not subtract a mean"):
        va.variation_coefficient(build("rms"), images())


# ---- kernels and lambdas


def test_a_planted_kernel_is_seen_where_it_looks():
    model = build("dtn(blocks=1)")
    model.blocks[0].norm1.a.data = torch.tensor([[-50.0, 100.0, 0.0], [0.0, 0.0, 0.0]])
    values = va.kernel_images(model)["blocks.0.norm1"]
    peaked = torch.zeros(GRID)
    peaked[1, 3] = 1  # one column right of the middle, row 1 and column 2
    torch.testing.assert_close(values, torch.stack([peaked, torch.full(GRID, 1 / 15)]), atol=1e-6, rtol=0)
    assert list(va.kernel_images(build("gpsa(blocks=2)"))) == ["blocks.0.attn.positions", "blocks.1.attn.positions"]
    with pytest.raises(va.NotHere, match="apply dtn or gpsa"):
        va.kernel_images(build())
    marks = list(va.FIGURES["kernels"].draw({"x": va.kernel_images(model)}).axes[0].lines)
    assert [line.get_xydata().tolist() for line in marks] == [[[2, 1], [8, 1]], [[3, 1]]], (
        "of the even kernel no largest"
    )


def test_lambdas_of_weights_and_over_training():
    model = build("dtn(blocks=1)")
    model.blocks[0].norm1.omega_mean.data = torch.tensor([0.0, math.log(3)])
    values = va.trade_offs(model)
    assert values["mean blocks.0.norm1"].tolist() == pytest.approx([0.5, 0.75])
    over = va.trade_offs_over_training(rows())
    assert over["epoch"].tolist() == [2, 4]
    np.testing.assert_allclose(over["variance blocks.0.norm1"], [[0.1, 0.9], [0.3, 0.9]], rtol=1e-6)
    with_start, _ = va.FIGURES["lambdas"].of(examined(changes="dtn(blocks=1)"))
    np.testing.assert_allclose(
        with_start["base"]["mean blocks.0.norm1"], [[0.5, 0.5], [0.1, 0.9], [0.3, 0.9]], rtol=1e-6
    )
    assert with_start["base"]["epoch"].tolist() == [0, 2, 4]
    ends, _ = va.FIGURES["lambdas"].of(examined(changes="dtn(blocks=1)", record=rows()[:1]))
    assert ends["base"]["epoch"].tolist() == [0, 1]
    alone, _ = va.FIGURES["lambdas"].of(examined(changes="dtn(blocks=1)", record=(), start=None))
    axes = va.FIGURES["lambdas"].draw(alone).axes
    assert [line.get_xdata().tolist() for line in axes[0].lines] == [[0], [1]], "equal heads hide no other"
    assert not [tick for item in axes for tick in item.get_xticks()]
    with pytest.raises(va.NotHere, match="apply dtn"):
        va.trade_offs(build())


# ---- studies and timing


def test_branches_are_counted_at_fixed_blocks():
    kind, base = va.FIGURES["branches"], examined()
    values, why = kind.of(base, examined("parallel", "parallel(branches=3)", score=81.0), examined("rms", "rms"))
    assert {name: int(v["branches"]) for name, v in values.items()} == {"base": 1, "parallel": 3}
    assert {int(v["blocks"]) for v in values.values()} == {3}
    assert "more than size and branches" in why["rms"]
    assert "parallel" in kind.of(base)[1]["base"]


def test_stems_by_their_multiply_adds_with_intervals_and_a_unit():
    kind, facts = va.FIGURES["stems"], {"metric": "top-1 accuracy, %"}
    arms = [
        examined("base", "", **facts),
        examined("dpn", "dpn", score=81.0, interval=(80.5, 82.0), **facts),
        examined("gelu", "stem(kind=linear,gelu=true)", score=79.0, **facts),
    ]
    values, _ = kind.of(*arms, examined("rms", "rms", score=1.0, **facts))
    assert list(values) == ["base", "dpn", "gelu"]
    assert int(values["base"]["macs"]) == count_macs(build().vit_config)
    assert {"macs", "top-1 accuracy, %"} == set(values["base"])
    (axes,) = kind.draw(values).axes
    assert axes.get_ylabel() == "top-1 accuracy, %"
    assert [80.5, 82.0] in [list(line.get_ydata()) for line in axes.lines]
    assert axes.get_ylim()[0] < 80 < 82 < axes.get_ylim()[1]
    assert axes.get_xlim()[0] < float(values["base"]["macs"]) / 1e3 < axes.get_xlim()[1]
    assert "one stem" in kind.of(arms[0])[1]["base"]


def test_gradients_have_a_logarithmic_axis_and_the_head_on_request():
    kind = va.FIGURES["gradients"]
    for head in (False, True):
        values, _ = kind.of(examined(head=head))
        assert ("head" in values["base"]) == head
        (axes,) = kind.draw(values).axes
        assert axes.get_yscale() == "log"
        assert ("head" in [label.get_text() for label in axes.get_xticklabels()]) == head


def test_missing_models_are_named_in_the_figure():
    """With the reason but not the remedy, within the figure and below its panels."""
    kind = va.FIGURES["kernels"]
    values, why = kind.of(examined("dtn", "dtn(blocks=1)"), examined("base"), examined("$x$ rms", "rms"))
    drawn = kind.draw(values)
    note_missing(drawn, why)
    width, height = pixels(drawn).shape[1::-1]
    (legend,) = drawn.legends
    note, box = legend.get_title(), legend.get_window_extent()
    assert note.get_text().replace("\n", " ") == "Not available for base, $x$ rms: no position kernels."
    assert box.x0 >= 0 <= box.y0
    assert box.x1 <= width
    assert all(axes.get_tightbbox().y0 >= box.y1 for axes in drawn.axes)
    assert height > pixels(kind.draw(values)).shape[0]


def test_costs_of_training_a_part(short_timing):
    model = build()
    values = va.training_costs(model, images(4), budget_s=0.05)
    parts = [vm.finetune.train_only(model, part).trained for part in ("all", "attention", "ffn")]
    assert values["parameters"].tolist() == parts
    assert values["memory"][0] > values["memory"][1] > 0
    assert (values["step"] > 0).all()


# ---- every figure


@pytest.fixture(scope="module")
def together():
    """Four models that have between them everything."""
    values = [
        examined(),
        examined("dtn+dpn $x$", "dtn(blocks=2)+dpn", record=rows(0.3), score=82.0),
        examined("parallel", "parallel(branches=3)", score=81.0),
        examined("dpn", "dpn", score=81.5),
    ]
    for item in (values[1], values[3]):
        item.model.patch_embed.norm_before.weight.data = torch.rand(48)
    return values


@pytest.fixture
def short_timing(monkeypatch):
    monkeypatch.setattr("vitmods.bench.BLOCK_S", 0.001)
    monkeypatch.setattr("vitmods.bench.SIDE", {"cpu": 16})
    monkeypatch.setattr("vitmods.analysis.figures.training.BLOCK_S", 0.001)
    monkeypatch.setattr("vitmods.bench.ROUNDS", (3, 3))


def pixels(drawn):
    """(rows, columns, 4) as a reader sees them."""
    canvas = FigureCanvasAgg(drawn)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())


def ink(drawn):
    """Of each panel, the fraction of its pixels that its data are drawn in: what changes where these are hidden."""
    full = pixels(drawn).astype(int)
    drawn.set_layout_engine("none")
    data = [a for axes in drawn.axes for a in (*axes.lines, *axes.patches, *axes.images, *axes.collections)]
    for artist in data:
        artist.set_visible(False)
    changed = np.abs(full - pixels(drawn)).max(-1) > 8
    for artist in data:
        artist.set_visible(True)
    boxes = [axes.get_window_extent() for axes in drawn.axes if axes.get_visible()]
    high = len(changed)
    return [float(changed[high - int(b.y1) : high - int(b.y0), int(b.x0) : int(b.x1)].mean()) for b in boxes]


@pytest.mark.parametrize("name", va.FIGURES)
def test_a_figure_shows_its_data(name, together, short_timing):
    """No panel is empty, every model is named, and every value is a row of the file."""
    kind = va.FIGURES[name]
    values, why = kind.of(*together)
    assert values
    assert set(values) | set(why) == {item.name for item in together}
    assert all(reason.endswith((".", "?")) for reason in why.values())
    drawn = kind.draw(values)
    assert min(ink(drawn)) > 0.001, "an empty panel"
    texts = " ".join(text.get_text() for text in drawn.findobj(lambda artist: hasattr(artist, "get_text")))
    assert all(model in texts for model in values) or name == "branches" or len(values) == 1
    table = list(csv.DictReader(io.StringIO(kind.csv(values))))
    sizes = [v.numel() for arrays in values.values() for part, v in arrays.items() if part not in kind.columns]
    assert len(table) == sum(sizes) > 0
    inputs = [math.isfinite(float(row[kind.columns[-1]])) for row in table]
    assert any(inputs) if name == "gradients" else all(inputs)  # blocks that are not trained have none
    assert {"title", "source", "see"} <= {key for key, value in vars(kind).items() if value}


def test_a_legend_has_room_whatever_the_names():
    """Long names stay within the figure, and many take nothing from the panel."""

    def panel(values):
        drawn = va.FIGURES["stem_gradient"].draw(values)
        full = pixels(drawn).shape
        box, legends = drawn.axes[0].get_window_extent(), [item.get_window_extent() for item in drawn.legends]
        assert all(item.x0 >= 0 and item.x1 <= full[1] and item.y1 <= box.y0 for item in legends)
        return box.height

    item = va.stem_gradient(rows())
    high = panel({"base": item, "dpn": item})
    assert panel({f"an arm with a very long name, which has no end {k}": item for k in range(12)}) > 0.95 * high


def test_coordinates_are_in_the_file(together):
    kind = va.FIGURES["lambdas"]
    table = list(csv.DictReader(io.StringIO(kind.csv(kind.of(*together)[0]))))
    assert {row["epoch"] for row in table} == {"0.0", "2.0", "4.0"}
    assert {row["head"] for row in table} == {"1", "2"}


def test_models_of_other_libraries():
    """timm's ViT is read as ours; other models are refused with a reason."""
    reference = timm.create_model("vit_tiny_patch16_224", img_size=48, depth=2).eval()
    inputs = va.Examined("timm", reference, images=torch.randn(2, 3, 48, 48))
    assert va.FIGURES["token_magnitude"].of(inputs)[0]["timm"]["before"].shape == (3, 3, 3)
    other = va.Examined("other", nn.Sequential(nn.Conv2d(3, 4, 3)), images=images())
    for name in ("token_magnitude", "kernels", "first_norm", "attention_distance"):
        values, why = va.FIGURES[name].of(other)
        assert not values
        assert "not a plain ViT" in why["other"]
    assert "--data" in va.FIGURES["variation"].of(va.Examined("timm", reference))[1]["timm"]
    assert "weights" in va.FIGURES["kernels"].of(va.Examined("gone"))[1]["gone"]
