"""Models made to deceive: each change is what it defines, as the model itself computes it when told to, or refused."""

import copy
import functools

import peft
import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

import vitmods as vm
from vitmods.util.errors import NoEffect, Refused, UserError

DIM, HEADS, TOKENS = 24, 4, 6
DEFINITION = {"layerscale(init=0.3)": "scale", "qknorm": "qk", "subln(rescale=false)": "sub", "gate(per=head)": "gate"}
"""change -> the flag with which these models compute it"""


class Attention(nn.Module):
    """Attention that can compute each change itself. ``count`` is what it says of its heads; ``cut`` how they lie in
    the channels; ``joint`` is a map for queries, keys and values; ``extra`` reads queries, keys or heads elsewhere."""

    def __init__(self, heads=HEADS, count=None, cut="h d", joint="", extra="", lora=False):
        super().__init__()
        self.num_heads, self.true_heads, self.cut, self.joint, self.extra = count or heads, heads, cut, joint, extra
        if joint:
            self.qkv = nn.Linear(DIM, 3 * DIM)
        else:
            self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.proj = nn.Linear(DIM, DIM)
        if extra == "talk":
            self.talk = nn.Linear(heads, heads)
        self.says = {}

    def split(self, x):
        if self.cut == "d h":
            return x.unflatten(-1, (-1, self.true_heads)).movedim(-1, 1)
        return x.unflatten(-1, (self.true_heads, -1)).movedim(-2, 1)

    def forward(self, x):
        if self.joint == "h t d":
            q, k, v = self.qkv(x).unflatten(-1, (self.true_heads, 3, -1)).permute(3, 0, 2, 1, 4)
        elif self.joint:
            q, k, v = map(self.split, self.qkv(x).chunk(3, -1))
        else:
            q, k, v = map(self.split, (self.q(x), self.k(x), self.v(x)))
        if self.says.get("qk"):
            q, k = (F.layer_norm(y, y.shape[-1:], eps=1e-6) for y in (q, k))
        logits = q @ k.mT / q.shape[-1] ** 0.5
        if self.extra == "positions":
            logits = logits + q.mean(-1, keepdim=True)  # the same for all keys, but not after this
            logits = logits * torch.linspace(0.5, 1, x.shape[1])
        if self.extra == "talk":
            logits = self.talk(logits.movedim(1, -1)).movedim(-1, 1)
        if self.extra == "cosine":
            logits = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
        heads = logits.softmax(-1) @ (v + (0.1 * q if self.extra == "value" else 0))
        heads = (heads.movedim(1, -1) if self.cut == "d h" else heads.transpose(1, 2)).flatten(-2)
        if self.says.get("gate"):
            gates = self.says["gate"](x).sigmoid()
            heads = (heads.unflatten(-1, (self.true_heads, -1)) * gates[..., None]).flatten(-2)
        if self.says.get("sub"):
            heads = F.layer_norm(heads, heads.shape[-1:], eps=1e-5)
        if self.extra == "weights":
            return F.linear(heads, self.proj.weight, self.proj.bias)
        return self.proj(heads)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.says = nn.Linear(DIM, 32), nn.Linear(32, DIM), {}

    def forward(self, x):
        hidden = F.gelu(self.fc1(x))
        if self.says.get("sub"):
            hidden = F.layer_norm(hidden, hidden.shape[-1:], eps=1e-5)
        return self.fc2(hidden)


BEHIND = {
    "": lambda y: y,
    "half": lambda y: 0.5 * y,
    "rms": lambda y: y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt(),
    "tanh": torch.tanh,
    "relu": torch.relu,
    "layer_norm": lambda y: F.layer_norm(y, y.shape[-1:]),
    "square root": lambda y: y.sign() * y.abs().sqrt(),
    "cut": lambda y: y.clamp(-0.3, 0.3),
    "centered": lambda y: y - y.mean(-1, keepdim=True),
}


class Block(nn.Module):
    """``kind`` is how branches and norms are put together, ``behind`` what follows a branch, in both or one mode."""

    def __init__(self, kind="pre", behind="", mode="", norm=nn.LayerNorm, **attention):
        super().__init__()
        self.norm1, self.norm2, self.attn, self.mlp = norm(DIM), norm(DIM), Attention(**attention), MLP()
        self.kind, self.behind, self.mode, self.says = kind, behind, mode, {}
        if kind == "adapter":
            self.down, self.up = nn.Linear(DIM, 3), nn.Linear(3, DIM)

    def last(self, y):
        y = BEHIND[self.behind](y) if self.mode in ("", ("evaluation", "training")[self.training]) else y
        return y * self.says.get("scale", 1.0)

    def forward(self, x):
        keep = 0.8 if self.kind == "scaled stream" else 1.0
        y = self.attn(x if self.kind == "norm behind" else self.norm1(x))
        if self.kind == "parallel":
            return x + self.last(y) + self.last(self.mlp(self.norm1(x)))
        if self.kind == "norm behind":
            x = x + self.last(self.norm1(y))
            return x + self.last(self.norm2(self.mlp(x)))
        x = keep * x + self.last(y) + (0.1 * torch.tanh(y) if self.kind == "twice" else 0)
        z = self.norm1(x) if self.kind == "shared norm" else self.norm2(x)
        y = self.mlp(z)
        if self.kind == "adapter":
            y = y + self.up(torch.relu(self.down(z)))
        return keep * x + self.last(y)


class Output(nn.Module):
    """The last map of a branch, which adds the stream (VideoMAE, BERT)."""

    def __init__(self, width):
        super().__init__()
        self.dense, self.says = nn.Linear(width, DIM), {}

    def forward(self, y, stream):
        return stream + self.says.get("scale", 1.0) * self.dense(y)


class LastAdds(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn, self.output1 = nn.LayerNorm(DIM), Attention(), Output(DIM)
        self.norm2, self.fc1, self.output2 = nn.LayerNorm(DIM), nn.Linear(DIM, 32), Output(32)

    def forward(self, x):
        x = self.output1(self.attn(self.norm1(x)), x)
        return self.output2(F.gelu(self.fc1(self.norm2(x))), x)


class LayerNormOfOurs(nn.Module):
    """A LayerNorm that is not PyTorch's."""

    def __init__(self, dim):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias)


class WithoutAttention(MLP):
    """A block in which none is recognized."""

    def forward(self, x):
        return x + super().forward(x)


class Model(nn.Module):
    def __init__(self, *blocks, head="random", unused=()):
        super().__init__()
        self.blocks, self.unused = nn.ModuleList(blocks), nn.ModuleList(unused)
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, 3)
        if head == "zero":
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Named(nn.Module):
    """Blocks under names, as torchvision's, beside a list of others."""

    def __init__(self, *others):
        super().__init__()
        self.layer_a, self.layer_b, self.others, self.norm = Block(), Block(), nn.ModuleList(others), nn.LayerNorm(DIM)

    def forward(self, x):
        x = self.layer_b(self.layer_a(x))
        for block in self.others:
            x = block(x)
        return self.norm(x)


def two(**settings):
    return lambda: Model(*(Block(**settings) for _ in range(2)))


def shared(*names):
    def make():
        model = two()()
        for name in names:
            path, _, last = name.rpartition(".")
            setattr(model.blocks[1].get_submodule(path), last, model.blocks[0].get_submodule(name))
        return model

    return make


def with_lora():
    return peft.get_peft_model(two()(), peft.LoraConfig(target_modules=["proj", "fc2"], init_lora_weights=False))


def compiled():
    model = two()()
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    return model


def zero_branches():
    model = two()()
    for name, parameter in model.named_parameters():
        if "proj." in name or "fc2." in name:
            nn.init.zeros_(parameter)
    return model


def quantized():
    return torch.ao.quantization.quantize_dynamic(two()(), {nn.Linear})


SCALE, QK, SUB, GATE = DEFINITION
NORM = "norm(kind=scale)"
RIGHT, REFUSED = None, UserError
CASES = {
    # where the branch is
    "pre-norm": (two(), SCALE, RIGHT),
    "norm behind the branch": (two(kind="norm behind"), SCALE, RIGHT),
    "parallel": (two(kind="parallel"), SCALE, RIGHT),
    "shared norm": (two(kind="shared norm"), SCALE, RIGHT),
    "half": (two(behind="half"), SCALE, RIGHT),
    "last map adds the stream, behind another": (lambda: Model(LastAdds(), LastAdds()), SCALE, RIGHT),
    "blocks that are called twice": (lambda: Model(*[Block()] * 2), SCALE, RIGHT),
    "adapter beside the MLP": (two(kind="adapter"), SCALE, RIGHT),
    "names beside a list": (lambda: Named(Block(), Block()), SCALE, RIGHT),
    "zero head": (lambda: Model(Block(), Block(), head="zero"), SCALE, RIGHT),
    "zero branches": (zero_branches, SCALE, RIGHT),
    # what is behind it
    **{f"{b} behind the branch": (two(behind=b), SCALE, REFUSED) for b in BEHIND if b not in ("", "half")},
    "tanh in training": (two(behind="tanh", mode="training"), SCALE, REFUSED),
    "norm in training": (two(behind="rms", mode="training"), "normformer", REFUSED),
    "tanh in evaluation": (two(behind="tanh", mode="evaluation"), SCALE, REFUSED),
    "scaled stream": (two(kind="scaled stream"), SCALE, REFUSED),
    "branch that is read twice": (two(kind="twice"), SCALE, REFUSED),
    "zero head, tanh": (lambda: Model(Block(behind="tanh"), Block(behind="tanh"), head="zero"), SCALE, REFUSED),
    # what is shared, left out, wrapped
    "shared attention": (shared("attn"), SCALE, REFUSED),
    "shared attention, queries": (shared("attn"), QK, RIGHT),
    "shared queries": (shared("attn.q", "attn.k"), QK, REFUSED),
    "shared projection": (shared("attn.proj"), SUB, REFUSED),
    "shared MLP": (shared("mlp"), SCALE, REFUSED),
    "shared norms": (shared("norm1"), NORM, REFUSED),
    "decoder that does not run": (lambda: Model(Block(), unused=[Block()]), SCALE, REFUSED),
    "block of another kind": (lambda: Model(Block(), WithoutAttention(), Block()), SCALE, REFUSED),
    "compiled block": (compiled, SCALE, REFUSED),
    "LoRA inside": (with_lora, SCALE, RIGHT),
    "LoRA inside, norm": (with_lora, SUB, RIGHT),
    "quantized": (quantized, NORM, REFUSED),
    "quantized, factor": (quantized, SCALE, REFUSED),
    "norms of another class": (two(norm=LayerNormOfOurs), NORM, REFUSED),
    "norms that do not run": (lambda: Model(Block(), unused=[Block()]), NORM, REFUSED),
    "placement at its defaults": (two(), "placement(reading=branch)", NoEffect),
    "no norm for one of two branches": (two(kind="parallel"), "placement(attn=post,reading=branch)", REFUSED),
    # heads
    "heads": (two(), QK, RIGHT),
    "heads of a joint map": (two(joint="t h d"), QK, RIGHT),
    "heads first in a joint map": (two(joint="h t d"), QK, RIGHT),
    "heads that talk": (two(extra="talk"), QK, RIGHT),
    "heads in a zero head": (lambda: Model(Block(), Block(), head="zero"), QK, RIGHT),
    "channels before heads": (two(cut="d h"), QK, REFUSED),
    "channels before heads, joint": (two(cut="d h", joint="t d h"), QK, REFUSED),
    "more heads than true": (two(count=8), QK, RIGHT),
    "fewer heads than true": (two(count=2), QK, RIGHT),
    "queries in values": (two(extra="value"), QK, REFUSED),
    "queries in positions": (two(extra="positions"), QK, REFUSED),
    "cosine attention": (two(extra="cosine"), QK, REFUSED),
    "gates": (two(), GATE, RIGHT),
    "gates of a joint map": (two(joint="h t d"), GATE, RIGHT),
    "gates, channels before heads": (two(cut="d h"), GATE, REFUSED),
    "gates, fewer heads than true": (two(count=2), GATE, RIGHT),
    # norms inside
    "norms inside": (two(), SUB, RIGHT),
    "norms inside, norm behind": (two(kind="norm behind"), SUB, RIGHT),
    "norms inside, weights read": (two(extra="weights"), SUB, REFUSED),
}  # fmt: skip


def output(model, training=False):
    x = torch.randn(2, TOKENS, DIM, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.train(training)(x)


@torch.no_grad()
def scramble(model):
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def make(build, scrambled):
    torch.manual_seed(0)
    model = build()
    return scramble(model) if scrambled and build is not quantized else model


def say(model, flag, value):
    for module in model.modules():
        if hasattr(module, "says"):
            gate = getattr(module, "vm_gate", None)
            module.says = {flag: gate.gate if flag == "gate" and gate is not None else value}


@pytest.mark.parametrize(
    ("case", "scrambled"),
    [
        *(pytest.param(case, True, id=f"{case}-trained") for case in CASES),
        *(
            pytest.param(
                case, False, id=f"{case}-new", marks=[pytest.mark.long] * (number % 6 > 0 and "zero" not in case)
            )
            for number, case in enumerate(CASES)
        ),
    ],
)
def test_a_change_is_what_it_defines_or_refused(case, scrambled):
    build, text, expected = CASES[case]
    model = make(build, scrambled)
    apply = functools.partial(
        vm.apply, model, *vm.parse_changes(text), in_place=True, example=torch.randn(2, TOKENS, DIM)
    )
    if expected is not RIGHT:
        with pytest.raises(expected):
            apply()
        return
    changed = apply()
    assert "1 of 2" not in str(vm.diff(model, changed, torch.randn(2, TOKENS, DIM)))
    for training in (False, True):
        reference = copy.deepcopy(model if text != GATE else changed)
        say(reference, DEFINITION[text], 0.3 if text == SCALE else True)
        for insert in [m for m in reference.modules() if hasattr(m, "vm_gate")]:
            insert.vm_gate.withdraw(insert)
        torch.testing.assert_close(output(changed, training), output(reference, training), rtol=1e-4, atol=1e-5)
        if "zero" not in case or scrambled:
            assert (output(changed, training) - output(model, training)).abs().max() > 1e-4


def test_the_comparison_counts_attentions():
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, global_pool="map", class_token=False)
    changed = vm.apply(model, vm.QKNorm(), in_place=True)
    assert "2 of 3 changed; attn_pool: it pools tokens" in str(vm.diff(model, changed))


def test_an_exact_conversion_is_checked_in_front_of_a_zero_head():
    sizes = {"num_classes": 3, "img_size": 56, "embed_dim": 24, "depths": (1, 1), "num_heads": (2, 4)}
    model = timm.create_model("swin_tiny_patch4_window7_224", **sizes)
    nn.init.zeros_(model.head.fc.weight)
    with pytest.raises(Refused, match="changes the outputs"):
        vm.apply(model, vm.Norm("rms"), in_place=True)
