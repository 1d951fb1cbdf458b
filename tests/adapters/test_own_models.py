"""Vision Transformers as people write them themselves, listed by structure: each change is what it defines, or refused.

Images are 3 x 32 x 32, and no example is needed.
"""

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vitmods as vm
from vitmods.adapters.opened import open_attentions
from vitmods.util.errors import UserError

DIM, HEADS, PATCH = 24, 4, 8
SUB = "subln(rescale=false)"
NORMED = [False]
"""whether attention normalizes its queries and keys itself"""


def normed(q, k):
    return (F.layer_norm(x, x.shape[-1:], eps=1e-6) for x in (q, k)) if NORMED[0] else (q, k)


def weigh(q, k, v):
    """Attention of heads (..., N, channels)."""
    q, k = normed(q, k)
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


def weigh_fused(q, k, v):
    return F.scaled_dot_product_attention(*normed(q, k), v)


def split(x, heads=HEADS):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge(x):
    return x.transpose(1, 2).flatten(2)


class Joint(nn.Module):
    """One map for all, cut into three and then into heads."""

    weigh = staticmethod(weigh)

    def __init__(self, bias=True):
        super().__init__()
        self.to_all = nn.Linear(DIM, 3 * DIM, bias=bias)
        self.out = nn.Linear(DIM, DIM, bias=bias)

    def cut(self, x):
        return map(split, x.chunk(3, -1))

    def forward(self, x):
        return self.out(merge(self.weigh(*self.cut(self.to_all(x)))))


class HeadsFirst(Joint):
    def cut(self, x):
        return x.unflatten(-1, (HEADS, 3, -1)).permute(3, 0, 2, 1, 4)


class Folded(Joint):
    """Heads beside the images of the batch."""

    def weigh(self, q, k, v):
        return weigh(*(y.flatten(0, 1) for y in (q, k, v))).unflatten(0, (-1, HEADS))


class Fused(Joint):
    weigh = staticmethod(weigh_fused)


class Relu(Joint):
    """Attention without softmax."""

    def weigh(self, q, k, v):
        return (q @ k.mT).relu() / q.shape[2] @ v


class Named(nn.Module):
    """Three maps of any names, and heads of any name."""

    names = ("queries", "keys", "values", "projection")

    def __init__(self, heads_are="parts", stated=HEADS):
        super().__init__()
        for name in self.names:
            setattr(self, name, nn.Linear(DIM, DIM))
        setattr(self, heads_are, stated)

    def forward(self, x):
        q, k, v = (split(getattr(self, name)(x)) for name in self.names[:3])
        return getattr(self, self.names[3])(merge(weigh(q, k, v)))


class Numbered(Named):
    names = ("lin1", "lin2", "lin3", "lin4")


class ListOfMaps(nn.Module):
    def __init__(self):
        super().__init__()
        self.h, self.linears = HEADS, nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x):
        return self.linears[3](merge(weigh(*(split(linear(x)) for linear in self.linears[:3]))))


class SharedKeys(nn.Module):
    """Fewer heads of keys, made with the values by one map."""

    def __init__(self, groups=HEADS):
        super().__init__()
        self.groups = groups
        self.ask, self.tell = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * groups * DIM // HEADS)
        self.back = nn.Linear(DIM, DIM)

    def forward(self, x):
        k, v = (split(y, self.groups).repeat_interleave(HEADS // self.groups, 1) for y in self.tell(x).chunk(2, -1))
        return self.back(merge(weigh(split(self.ask(x)), k, v)))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(DIM, DIM // HEADS, bias=False) for _ in range(3))

    def forward(self, x):
        return weigh(self.query(x), self.key(x), self.value(x))


class ModulePerHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.each, self.join = nn.ModuleList(Head() for _ in range(HEADS)), nn.Linear(DIM, DIM)

    def forward(self, x):
        return self.join(torch.cat([head(x) for head in self.each], -1))


class Convolutions(nn.Module):
    """Maps of (B, C, N), which it puts out too."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Conv1d(DIM, DIM, 1) for _ in range(4))

    def forward(self, x):
        q, k, v = (split(conv(x.mT).mT) for conv in (self.q, self.k, self.v))
        return self.o(merge(weigh(q, k, v)).mT)


class Apart(nn.Module):
    """The product in a module of its own."""

    class Product(nn.Module):
        def forward(self, q, k, v):
            return weigh(q, k, v)

    def __init__(self):
        super().__init__()
        self.product, self.to_all, self.end = self.Product(), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.to_out = nn.Sequential(self.end, nn.Dropout(0.1))

    def forward(self, x):
        return self.to_out(merge(self.product(*map(split, self.to_all(x).chunk(3, -1)))))


class OneHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x):
        return self.d(weigh(self.a(x), self.b(x), self.c(x)))


class PyTorch(nn.Module):
    def __init__(self, first=True):
        super().__init__()
        self.first, self.mha = first, nn.MultiheadAttention(DIM, HEADS, batch_first=first)

    def forward(self, x):
        x = x if self.first else x.transpose(0, 1)
        x = self.mha(x, x, x)[0]
        return x if self.first else x.transpose(0, 1)


class Raw(nn.Module):
    """Weights without maps: nothing can be put between the queries and their product."""

    def __init__(self):
        super().__init__()
        self.w, self.o = nn.Parameter(torch.randn(3, DIM, DIM) * 0.2), nn.Linear(DIM, DIM)

    def forward(self, x):
        return self.o(merge(weigh(*(split(x @ w) for w in self.w))))


class Functional(nn.Module):
    """One weight for queries, keys and values, and fused attention."""

    def __init__(self):
        super().__init__()
        self.w, self.o = nn.Parameter(torch.randn(3 * DIM, DIM) * 0.2), nn.Linear(DIM, DIM)

    def forward(self, x):
        return self.o(merge(weigh_fused(*map(split, F.linear(x, self.w).chunk(3, -1)))))


def in_a_row():
    return nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * DIM, DIM))


class GLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(DIM, 32), nn.Linear(DIM, 32), nn.Linear(32, DIM)

    def forward(self, x):
        return self.three(F.silu(self.one(x)) * self.two(x))


class ConvMLP(nn.Module):
    """Convolutions of a grid without class token, with channels on axis 1."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(DIM, 32, 1), nn.GELU(), nn.Conv2d(32, DIM, 1))

    def forward(self, x):
        return self.net(x.mT.unflatten(2, (4, 4))).flatten(2).mT


class OwnNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return F.normalize(x, dim=-1) * x.shape[-1] ** 0.5 * self.gamma


class Block(nn.Module):
    def __init__(self, attention=Joint, mlp=in_a_row, norm=nn.LayerNorm):
        super().__init__()
        self.ln_1, self.sa, self.ln_2, self.ff = norm(DIM), attention(), norm(DIM), mlp()

    def last(self, y):
        return y

    def forward(self, x):
        x = x + self.last(self.sa(self.ln_1(x)))
        return x + self.last(self.ff(self.ln_2(x)))


class ConvBlock(Block):
    def forward(self, x):
        x = x + self.sa(self.ln_1(x)).mT
        return x + self.ff(self.ln_2(x))


class PostNorm(Block):
    def forward(self, x):
        x = self.ln_1(x + self.sa(x))
        return self.ln_2(x + self.ff(x))


class Beside(Block):
    def forward(self, x):
        y = self.ln_1(x)
        return x + self.sa(y) + self.ff(y)


class Written(nn.Module):
    """Attention and MLP in the block itself."""

    def __init__(self, maps=False):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        if maps:
            self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))
        else:
            self.all = nn.Linear(DIM, 3 * DIM)
        self.join, self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, 32), nn.Linear(32, DIM)

    def forward(self, x):
        y = self.ln1(x)
        q, k, v = map(split, (self.q(y), self.k(y), self.v(y)) if hasattr(self, "q") else self.all(y).chunk(3, -1))
        x = x + self.join(merge(weigh(q, k, v)))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class PreNorm(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(DIM), inner

    def forward(self, x):
        return self.inner(self.norm(x))


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) + x


class InRow(nn.Sequential):
    def __init__(self):
        super().__init__(Residual(PreNorm(Joint())), Residual(PreNorm(in_a_row())))


class Squashed(Block):
    """What a branch puts out is squashed: factors in front of it are no LayerScale."""

    def forward(self, x):
        x = x + torch.tanh(self.sa(self.ln_1(x)))
        return x + self.ff(self.ln_2(x))


class ViT(nn.Module):
    """``stem`` is a convolution or a linear map of patches, ``table`` what keeps positions."""

    def __init__(self, block=Block, stem="conv", table="parameter", token=True, **settings):
        super().__init__()
        self.kind, side = stem, 32 // PATCH
        self.patches = nn.Conv2d(3, DIM, PATCH, PATCH) if stem == "conv" else nn.Linear(3 * PATCH**2, DIM)
        self.cls = nn.Parameter(torch.randn(1, 1, DIM)) if token else None
        positions = torch.randn(1, side**2 + token, DIM) * 0.2
        if table == "parameter":
            self.pos = nn.Parameter(positions)
        elif table == "buffer":
            self.register_buffer("pos", positions)
        elif table == "embedding":
            self.pos_emb = nn.Embedding(side**2 + token, DIM)
        elif table == "kept":
            self.pos = positions
        self.layers = self.make(block, settings)
        self.last, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, 3)

    def make(self, block, settings):
        return nn.ModuleList(block(**settings) for _ in range(2))

    def encode(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, images):
        if self.kind == "conv":
            x = self.patches(images).flatten(2).mT
        else:
            cut = images.unflatten(3, (-1, PATCH)).unflatten(2, (-1, PATCH)).permute(0, 2, 4, 3, 5, 1)
            x = self.patches(cut.flatten(3).flatten(1, 2))
        x = x if self.cls is None else torch.cat((self.cls.expand(len(x), -1, -1), x), 1)
        if hasattr(self, "pos_emb"):
            x = x + self.pos_emb(torch.arange(x.shape[1]))
        elif hasattr(self, "pos"):
            x = x + self.pos
        x = self.last(self.encode(x))
        return self.head(x.mean(1) if self.cls is None else x[:, 0])


class Lossy(nn.Module):
    """Leaves out branches of images in training, by a class of its own."""

    def forward(self, x):
        return x * (torch.rand(len(x), 1, 1) > 0.5) * 2 if self.training else x


class LossyBlock(Block):
    def __init__(self):
        super().__init__()
        self.lossy = Lossy()

    def last(self, y):
        return self.lossy(y)


class BatchNormed(Block):
    class OwnNorm(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x.mT).mT

    def __init__(self):
        super().__init__(norm=self.OwnNorm)


class Lists(ViT):
    """Branches in lists, whose residuals the model adds."""

    def make(self, block, settings):
        parts = ((nn.LayerNorm(DIM), Joint(), nn.LayerNorm(DIM), in_a_row()) for _ in range(2))
        return nn.ModuleList(map(nn.ModuleList, parts))

    def encode(self, x):
        for norm1, attention, norm2, mlp in self.layers:
            x = x + attention(norm1(x))
            x = x + mlp(norm2(x))
        return x


class Dicts(Lists):
    def make(self, block, settings):
        lists, names = super().make(block, settings), ("norm1", "attention", "norm2", "mlp")
        return nn.ModuleDict({f"layer_{i}": nn.ModuleDict(zip(names, part)) for i, part in enumerate(lists)})

    def encode(self, x):
        for part in self.layers.values():
            x = x + part["attention"](part["norm1"](x))
            x = x + part["mlp"](part["norm2"](x))
        return x


class TwoLists(ViT):
    """All attentions in one list and all MLPs in another."""

    def make(self, block, settings):
        parts = ((PreNorm(Joint()), PreNorm(in_a_row())) for _ in range(2))
        return nn.ModuleList(map(nn.ModuleList, zip(*parts)))

    def encode(self, x):
        for attention, mlp in zip(*self.layers):
            x = x + attention(x)
            x = x + mlp(x)
        return x


class Encoder(ViT):
    def make(self, block, settings):
        layer = nn.TransformerEncoderLayer(DIM, HEADS, 32, batch_first=True, activation="gelu", **settings)
        return nn.ModuleList([nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)])


def vit(block=Block, **settings):
    return lambda: ViT(block, **settings)


FORMS = {
    # how queries, keys and values are made
    "joint map": vit(),
    "joint map, heads first": vit(attention=HeadsFirst),
    "joint map without bias": vit(attention=lambda: Joint(bias=False)),
    "heads in the batch": vit(attention=Folded),
    "fused attention": vit(attention=Fused),
    "queries, keys, values": vit(attention=Named),
    "numbered maps, a head count of an odd name": vit(attention=lambda: Numbered("how_many")),
    "a wrong number of heads": vit(attention=lambda: Named("num_heads", stated=3)),
    "a list of maps": vit(attention=ListOfMaps),
    "keys and values by one map": vit(attention=SharedKeys),
    "fewer heads of keys": vit(attention=lambda: SharedKeys(2)),
    "a module per head": vit(attention=ModulePerHead),
    "convolutions, channels on axis 1": vit(ConvBlock, attention=Convolutions),
    "the product in a module": vit(attention=Apart),
    "one head": vit(attention=OneHead),
    "a weight without maps, fused": vit(attention=Functional),
    "weights without maps": vit(attention=Raw),
    "attention without softmax": vit(attention=Relu),
    "PyTorch's attention": vit(attention=PyTorch),
    "PyTorch's attention, tokens first": vit(attention=lambda: PyTorch(first=False)),
    # how blocks are put together
    "post-norm": vit(PostNorm),
    "attention beside the MLP": vit(Beside),
    "attention in the block": vit(Written),
    "attention in the block, three maps": vit(Written, maps=True),
    "residuals in a row": vit(InRow),
    "lists in the model": Lists,
    "dicts in the model": Dicts,
    "a list of attentions, one of MLPs": TwoLists,
    "branches left out by chance": vit(LossyBlock),
    "PyTorch's encoder": lambda: Encoder(norm_first=True),
    "PyTorch's post-norm encoder": lambda: Encoder(norm_first=False),
    "gated MLP": vit(mlp=GLU),
    "MLP of convolutions": vit(mlp=ConvMLP, token=False),
    "a norm of its own": vit(norm=OwnNorm),
    "squashed branch": vit(Squashed),
    # stems and positions
    "linear stem": vit(stem="linear"),
    "table of an embedding": vit(table="embedding"),
    "table in a buffer, mean": vit(table="buffer", token=False),
    "kept table, linear stem": vit(table="kept", stem="linear", token=False),
    "no table": vit(table="none"),
}


REFUSED = {
    "layerscale": {"attention without softmax", "squashed branch"},
    "qknorm": {"weights without maps", "attention without softmax"},
}
ENDS = re.compile(
    r"(^|\.)(out|projection|lin4|linears\.3|back|join|o|end|d|three|down|mha\.out_proj|self_attn\.out_proj|linear2"
    r"|ff\.3|net\.2|layers\.\d\.3\.3|inner\.inner\.3|layers\.1\.\d\.inner\.3"
    r"|mlp\.3)$"
)
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def make(form, is_trained):
    torch.manual_seed(0)
    model = FORMS[form]().eval()
    if is_trained:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def output(model, training, normed=False):
    NORMED[0] = normed
    for module in model.modules():
        module.training = training and not isinstance(module, nn.Dropout | Lossy)
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    try:
        with torch.no_grad():
            return model(IMAGES)
    finally:
        NORMED[0] = False


@torch.no_grad()
def scaled(model):
    """Factors of 0.3 in the last maps of the branches."""
    model = copy.deepcopy(model)
    ends = [module for name, module in model.named_modules() if ENDS.search(name)]
    assert len(ends) == 4
    for end in ends:
        for parameter in end.parameters(recurse=False):
            parameter.mul_(0.3)
    return model


NEW = ("joint map", "a wrong number of heads", "squashed branch")
"""forms whose untrained models, too, are changed in every run"""
ATTENDS_ALIKE = (
    *("post-norm", "attention beside the MLP", "residuals in a row", "dicts in the model", "gated MLP"),
    *("MLP of convolutions", "a norm of its own", "squashed branch", "linear stem", "table of an embedding"),
    *("table in a buffer, mean", "kept table, linear stem", "no table"),
)
"""forms whose attention is that of another one"""
CHANGED = [
    pytest.param(form, text, is_trained, id=f"{form}-{text}-{'trained' if is_trained else 'new'}", marks=marks)
    for form in FORMS
    for text in ("layerscale(init=0.3)", "qknorm")
    for is_trained in (False, True)
    for repeats in [(not is_trained and form not in NEW) or (text == "qknorm" and form in ATTENDS_ALIKE)]
    for marks in [[pytest.mark.long] * repeats]
]


@pytest.mark.parametrize(("form", "text", "is_trained"), CHANGED)
def test_a_change_of_a_form_is_what_it_defines(form, text, is_trained):
    model = make(form, is_trained)
    if form in REFUSED[text.partition("(")[0]]:
        with pytest.raises(UserError):
            vm.apply(model, *vm.parse_changes(text))
        return
    changed = vm.apply(model, *vm.parse_changes(text))
    names = {name for name, _ in model.named_parameters()}
    assert names <= {name for name, _ in changed.named_parameters()}
    for training in (False, True):
        after = output(changed, training)
        if text == "qknorm" and "PyTorch" in form:
            assert (after - output(model, training)).abs().max() > 1e-5
            continue
        expected = output(scaled(model), training) if "layerscale" in text else output(model, training, normed=True)
        torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"heads": 3}, "queries and keys of the heads of"),
        ({"attention": "*.attention"}, r"no module that runs fits attention '\*.attention'. These run: .*layers.0.sa"),
        ({"mlp": "nothing"}, "no module that runs fits mlp"),
        ({"atention": "*"}, "'atention' is not one of attention, heads, mlp"),
        ({"heads": "4"}, "heads is a number"),
        ({"mlp": 4}, "mlp is a pattern"),
    ],
)
def test_parts_that_are_not_found_are_named(parts, message):
    with pytest.raises(UserError, match=message):
        vm.apply(make("joint map", True), vm.QKNorm(), parts=parts)


def test_a_user_says_which_parts_a_model_has():
    model = make("attention without softmax", True)
    changed = vm.apply(model, vm.LayerScale(init=0.3), parts={"attention": "layers.*.sa", "mlp": "layers.*.ff"})
    torch.testing.assert_close(output(changed, False), output(scaled(model), False), rtol=1e-4, atol=1e-5)
    vm.apply(make("joint map", True), vm.QKNorm(), parts={"heads": 4})


MASKS = {
    "": {},
    "causal": {"attn_mask": torch.ones(5, 5).triu(1).bool()},
    "padding": {"key_padding_mask": torch.arange(5).expand(2, 5) > torch.tensor([[4], [2]])},
    "both, of each head": {
        "attn_mask": torch.randn(8, 5, 5),
        "key_padding_mask": torch.zeros(2, 5).index_fill(1, torch.tensor(4), -torch.inf),
    },
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    "settings",
    [{}, {"batch_first": True}, {"bias": False}, {"kdim": 6, "vdim": 7}, {"add_bias_kv": True, "add_zero_attn": True}],
)
def test_opened_attention_is_pytorch_s(settings, mask):
    inputs = [torch.randn(2, 5, width) for width in (8, settings.get("kdim", 8), settings.get("vdim", 8))]
    inputs = inputs if settings.get("batch_first") else [x.transpose(0, 1) for x in inputs]
    for weights in ({"need_weights": False}, {}, {"average_attn_weights": False}):
        attention = nn.MultiheadAttention(8, 4, **settings)
        expected = attention(*inputs, **weights, **MASKS[mask])
        names = list(attention.state_dict())
        open_attentions(attention)
        assert list(attention.state_dict()) == names
        for got, wanted in zip(attention(*inputs, **weights, **MASKS[mask]), expected, strict=True):
            torch.testing.assert_close(got, wanted) if wanted is not None else None
        if not mask and not settings:
            torch.testing.assert_close(attention(*(x[:, 0] for x in inputs))[0], expected[0][:, 0])


@pytest.mark.parametrize(
    ("form", "text"),
    [
        *(("PyTorch's attention", x) for x in ("gate", "gate(per=head)", SUB, "norm(kind=rms)", "swiglu")),
        *(("PyTorch's encoder", x) for x in ("gate(per=head)", SUB, "norm(kind=rms)")),
        *(("joint map", x) for x in ("gate", SUB, "swiglu")),
    ],
)
def test_changes_of_pytorch_s_attention(form, text):
    model = make(form, True)
    changed = vm.apply(model, *vm.parse_changes(text))
    moved = (output(changed, False) - output(model, False)).abs().max()
    assert moved < 1e-4 if text == "norm(kind=rms)" else moved > 1e-4


def test_the_comparison_uses_the_example_of_the_change():
    model = nn.Sequential(Block())
    example = torch.randn(3, 7, DIM)
    changed = vm.apply(model, vm.LayerScale(), example=example)
    assert "outputs on the example differ" in str(vm.diff(model, changed))


def test_norms_of_other_kinds_in_the_blocks_are_named():
    model = ViT(BatchNormed)
    with pytest.raises(UserError, match=r"leave out layers\.0\.ln_1, a OwnNorm that it does not replace"):
        vm.apply(model, *vm.parse_changes("norm(kind=rms,exact=false)"))
