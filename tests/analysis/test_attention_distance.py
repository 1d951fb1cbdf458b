import math

import pytest
import timm
import torch

import vitmods as vm
from vitmods import analysis as va
from vitmods.layers import Attention
from vitmods.util.errors import UserError


def build(changes="", **overrides):
    torch.manual_seed(0)
    model = vm.vit("mu3/4", **({"img_size": (12, 20), "num_classes": 5} | overrides))
    return vm.apply(model, *vm.parse_changes(changes))


def images():
    return torch.randn(3, 3, 12, 20, generator=torch.Generator().manual_seed(1))


def slow_distance(weights, grid, spacing=(1, 1)):
    """Pair by pair, of one matrix (T, T)."""
    weights = weights.tolist()
    places = [(r * spacing[0], c * spacing[1]) for r in range(grid[0]) for c in range(grid[1])]
    pairs = ((i, j) for i in range(len(places)) for j in range(len(places)))
    return sum(weights[i][j] * math.dist(places[i], places[j]) for i, j in pairs) / len(places)


def test_released_code(golden):
    """The released figure code sums over queries where the paper has their mean; its places are float32."""
    golden = golden("mean_attention_distance")
    side, attention = int(golden["hp.grid"]), Attention(16, 4, qkv_bias=False).double()
    attention.load_state_dict({"qkv.weight": golden["param.to_qkv.weight"]}, strict=False)
    weights = attention.weights(golden["in.x"])
    torch.testing.assert_close(weights.detach(), golden["in.attn_bhij"], atol=1e-12, rtol=0)
    distances = va.mean_distance(weights.detach(), (side, side)).mean(0)
    torch.testing.assert_close(distances, golden["out.mean_distance"], atol=1e-6, rtol=0)
    torch.testing.assert_close(distances * side**2, golden["out.dist_sum_over_queries"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("spacing", [(1.0, 1.0), (16.0, 8.0)])
def test_definition_on_an_oblong_grid(spacing):
    weights = torch.rand(2, 15, 15, dtype=torch.float64).softmax(-1)
    distances = va.mean_distance(weights, (3, 5), spacing)
    assert distances.tolist() == pytest.approx([slow_distance(w, (3, 5), spacing) for w in weights])


def test_known_weights_pixels_and_pools():
    assert float(va.mean_distance(torch.eye(12), (3, 4))) == 0
    step = torch.eye(4).roll(1, 1)  # each token reads the next, the last one the first
    assert float(va.mean_distance(step, (1, 4), (1, 10))) == pytest.approx((3 * 10 + 30) / 4)
    model = build()
    patches, pixels = (va.attention_distance(model, images(), unit) for unit in ("patches", "pixels"))
    for name, values in patches.items():
        torch.testing.assert_close(pixels[name], 4 * values)
    full = build("dtn(blocks=2)", img_size=(24, 24))
    pooled = build("dtn(blocks=2,pool=2)", img_size=(48, 48))
    for values, others in zip(va.kernel_distance(full).values(), va.kernel_distance(pooled).values(), strict=True):
        torch.testing.assert_close(others[0], 2 * values[0])  # the first head is local, the other one noise


@pytest.mark.parametrize(("changes", "reg_tokens"), [("", 2), ("gpsa(blocks=2)", 0), ("dtn(blocks=1)+layerscale", 2)])
def test_every_layer_of_a_model(changes, reg_tokens):
    """Against the weights that each block's attention would use, read off its input by hand."""
    model, inputs = build(changes, reg_tokens=reg_tokens), []
    distances = va.attention_distance(model, images())
    for block in model.blocks:
        block.register_forward_hook(lambda block, args, _: inputs.append(block.norm1(args[0])))
    with torch.no_grad():
        model.eval().forward_features(images())
    assert list(distances) == [f"blocks.{i}.attn" for i in range(3)]
    for name, tokens in zip(distances, inputs, strict=True):
        weights = model.get_submodule(name).weights(tokens)[..., -15:, -15:]
        weights = weights / weights.sum(-1, keepdim=True)
        expected = [[slow_distance(w, (3, 5)) for w in heads] for heads in weights]
        torch.testing.assert_close(distances[name], torch.tensor(expected).mean(0), atol=1e-4, rtol=0)


def test_the_model_is_left_as_it_was():
    model = build("dtn(blocks=1)", proj_drop=0.5).train()
    model.blocks[0].eval()
    modes, state = [m.training for m in model.modules()], torch.get_rng_state()
    first, second = va.attention_distance(model, images()), va.attention_distance(model, images())
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_models_of_timm_and_attention_that_does_not_run():
    reference = timm.create_model("vit_tiny_patch16_224", img_size=48, depth=2)
    distances = va.attention_distance(reference, torch.randn(2, 3, 48, 48))
    assert [values.shape for values in distances.values()] == [(3,)] * 2
    assert all(0 < float(v) < math.dist((0, 0), (2, 2)) for values in distances.values() for v in values)
    model = build()
    model.blocks[1].forward = lambda x: x
    with pytest.raises(UserError, match=r"blocks\.1\.attn does not run"):
        va.attention_distance(model, images())


@pytest.mark.parametrize("changes", ["dtn(blocks=2)", "dtn(blocks=2)+gpsa(blocks=2)"])
def test_kernels(changes):
    model = build(changes)
    distances = va.kernel_distance(model)
    assert len(distances) == 2 * len(changes.split("+"))
    for name, values in distances.items():
        px, py = model.get_submodule(name).kernels((3, 5))
        p = torch.einsum("hrs,hcw->hrcsw", py, px).reshape(-1, 15, 15)
        assert values.tolist() == pytest.approx([slow_distance(weights, (3, 5)) for weights in p], abs=1e-5)


def test_figure(tmp_path):
    """A dot for each head of each layer, a line for each model, and a file."""
    base, changed = build(), build("dtn(blocks=2)")
    models = {"LN": va.attention_distance(base, images()), "DTN": va.attention_distance(changed, images())}
    drawn = va.draw_distances(models)
    lines = drawn.axes[0].lines
    assert [line.get_label() for line in lines if not line.get_label().startswith("_")] == ["LN", "DTN"]
    assert sorted(y for line in lines if line.get_linestyle() == "None" for y in line.get_ydata()) == pytest.approx(
        sorted(float(v) for layers in models.values() for values in layers.values() for v in values)
    )
    low, high = drawn.axes[0].get_ylim()
    ends = [end for line in lines for end in (min(line.get_ydata()), max(line.get_ydata()))]
    assert 0 < low < min(ends) < max(ends) < high, "its own range"
    drawn.savefig(tmp_path / "distances.svg")
    assert (tmp_path / "distances.svg").stat().st_size > 1000


def test_parallel_branches_are_one_layer():
    """Three branches side by side are no three layers: a mean at the one block, with a dot for every head of each."""
    distances = va.attention_distance(build("parallel(branches=3)"), images())
    line, *dots = va.draw_distances({"parallel": distances}).axes[0].lines
    assert line.get_xdata().tolist() == [1]
    assert line.get_ydata()[0] == pytest.approx(float(torch.stack(list(distances.values())).mean()))
    assert [len(weights.get_xdata()) for weights in dots] == [6]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: va.mean_distance(torch.eye(11), (3, 4)), "3 x 4"),
        (lambda: va.kernel_distance(build()), "apply dtn or gpsa"),
        (lambda: va.kernel_distance(build("dtn(blocks=2,trade_off=1.0)")), "apply dtn or gpsa"),
        (lambda: va.attention_distance(build(), images(), "miles"), "not 'miles'"),
        (lambda: va.attention_distance(build(), images()[:0]), "at least one"),
    ],
)
def test_what_cannot_be_measured_is_refused(call, message):
    with pytest.raises(UserError, match=message):
        call()
