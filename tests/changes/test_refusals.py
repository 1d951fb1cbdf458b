"""What changes are called in the shell, what they refuse, and the words that say what to do instead."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import vitmods as vm
from vitmods.util.errors import NoEffect, SlotConflict, UserError

MISTAKES = [  # of the text alone
    ("dpm", "'dpn'"),
    ("dnp", "'dpn'"),
    ("normformr", "'normformer'"),
    ("sub-ln", "'subln'"),
    ("zzzzzz", "Known: .*dpn.*`vitmods changes`"),
    ("dpn(befor=false)", "'before'"),
    ("dpn(after=maybe)", "true or false.*'maybe'"),
    ("dpn(eps=small)", "number.*'small'"),
    ("dpn(norm=rmsnorm)", "'rms'"),
    ("norm", "kind"),
    ("norm(kind=batchnorm)", "'batch'"),
    ("norm(kind=rms,warmup=5)", "kind=power"),
    ("norm(kind=scale,gain=vector)", "scalar"),
    ("norm(kind=layer,exact=false)", "which is for kind=rms"),
    ("placement(attn=before)", "pre, post or pre\\+post"),
    ("placement(reading=residuals)", "'residual'"),
    ("dpn(before=false", "parentheses"),
    ("dpn)", "parentheses"),
    ("dpn++rms", "''"),
    ("+dpn", "''"),
    ("dpn rms", "'dpn rms'"),
    ("dpn(before=false)rms", "not a change"),
    ("dpn(before=false,after=false)", "without any norm"),
    ("dpn(class_token=true)", "after_position"),
    ("layerscale(init=0)", "layerscale"),
    ("norm", r"norm needs a kind, as in norm\(batch\)"),
    ("norm(bach)", "not have the setting 'bach'"),
    ("dpn(before=false,before=true)", "before=...\\) is given twice"),
    ("stem", "stem.kind=.*cannot be ''"),
    ("stem(kind=hmpl)", "Did you mean 'hmlp'"),
    ("stem(kind=hmlp,norm=lazer)", "Did you mean 'layer'"),
    ("stem(kind=hmlp,gelu=true)", "gelu=true.*kind=linear"),
    ("dpn(before=whitn)", "Did you mean 'whiten'"),
    ("dpn(before=whiten_norm,norm=rms)", "leave norm out"),
    ("size(depth=0)", "positive number"),
    ("size(depth=2,deeper=2)", "says the same twice"),
    ("size", "give depth, deeper"),
    ("gpsa(init=random)", "init"),
    ("gpsa(gate=nan)", "a number"),
    ("gpsa(blocks=0)", "at least 1"),
    ("dtn(norms=mlp)", "norms"),
    ("dtn(variant=official)", "variant"),
    ("dtn(blocks=0)", "at least 1"),
    ("dtn(trade_off=0.5,lambda_init=0.9)", "give one"),
    ("dtn(lambda_init=1)", "between 0 and 1"),
]


@pytest.mark.parametrize(("text", "says"), MISTAKES)
def test_mistakes_are_errors_that_say_what_to_do(text, says):
    with pytest.raises(UserError, match=says):
        vm.parse_changes(text)


SQUARE = {"img_size": 8}
UNFIT = [  # the base, its fields, changes, and the error
    ("mu/4", SQUARE, "size(wider=0.7)", "makes 22.4 channels of 32"),
    ("mu/4", SQUARE, "size(width=40)", "makes 2.5 heads of 40"),
    ("mu/4", SQUARE, "size(deeper=0.5)", "makes 0.5 blocks of 1"),
    ("mu/4", SQUARE, "size(heads=3)", "3 heads do not divide 32"),
    ("mu11/4", SQUARE, "parallel", "the model has 11, which 2 does not divide: give branches=11"),
    ("mu9/4", SQUARE, "parallel", "give branches=3 or 9"),
    ("mu4/4", SQUARE, "parallel(branches=8)", "the model has 4"),
    ("mu1/4", SQUARE, "parallel", "give it another depth"),
    ("mu4/4", SQUARE, "parallel(branches=0)", "at least 1, got 0"),
    ("mu4/4", SQUARE, "dtn(blocks=3)+parallel", "which 2 does not divide"),
    ("mu4/4", SQUARE, "postnorm+parallel", "share one residual sum"),
    ("mu4/4", SQUARE, "parallel+postnorm", "share one residual sum"),
    ("mu4/4", SQUARE, "normformer(residual_scale=true)+parallel", "set residual_scale=False"),
    ("mu/14", {"img_size": 28}, "local", "multiples of 4 pixels, not 14 x 14"),
    ("mu12/4", {"img_size": (12, 16)}, "dtn(eps=0)", "eps must be positive"),
    ("mu/16", {"img_size": 32}, "stem(kind=linear,gelu=true)+rms", "GELU at the end of the stem"),
    ("mu/16", {"img_size": 32}, "hmlp+rms", "stem.*writes a mean"),
    ("mu12/4", {"img_size": (12, 16)}, "gpsa(blocks=12)", "class token could join"),
    ("mu12/4", {"img_size": (12, 16)}, "gpsa(blocks=13)", "class token could join"),
    ("mu12/4", {"img_size": (12, 16)}, "dtn(blocks=12)", "class token could join"),
    ("mu12/4", {"img_size": (12, 16)}, "dtn(blocks=13)", "class token could join"),
    ("mu12/4", {"img_size": (12, 16)}, "dtn(pool=2)", "3 x 4"),
    ("mu2/4", {**SQUARE, "parallel": 2}, "valueresidual", "parallel branches"),
    ("mu1/4", SQUARE, "valueresidual", "second block"),
    ("mu2/4", {**SQUARE, "reg_tokens": 3}, "rope(register_base=100)", "square grid"),
    ("mu2/4", {**SQUARE, "num_heads": 16}, "rope", "multiple of 4"),
    ("mu2/4", {**SQUARE, "rel_pos": True}, "relpos(shared=true)", "one table"),
    ("mu2/4", {**SQUARE, "gate": "channel"}, "gate(start=open)", "without gates"),
]


@pytest.mark.parametrize(("base", "fields", "text", "says"), UNFIT, ids=str)
def test_changes_that_do_not_fit_the_model(base, fields, text, says):
    with pytest.raises(UserError, match=says):
        vm.apply(vm.vit(base, **fields), *vm.parse_changes(text))


NOTHING = [
    *(("mu2/4", "", text) for text in ("placement", "placement(attn=pre,mlp=pre,reading=branch)", "layernorm")),
    *(("mu2/4", text, text) for text in ("dpn", "rms", "subln", "normformer", "layerscale", "postnorm")),
    *(("mu2/4", "", text) for text in ("stem(kind=linear)", "size(depth=2)")),
    ("mu2/4", "dpn", "dpn(after=false)"),
    ("mu2/4", "hmlp", "stem(kind=hmlp,norm=batch)"),
    ("mu4/4", "", "sequential"),
    ("mu2x2/4", "", "parallel"),
]


@pytest.mark.parametrize(("base", "before", "text"), NOTHING)
def test_a_change_that_alters_nothing_is_an_error_naming_it(base, before, text):
    model, (change,) = vm.apply(vm.vit(base, img_size=8), *vm.parse_changes(before)), vm.parse_changes(text)
    with pytest.raises(NoEffect) as error:
        vm.apply(model, change)
    assert str(change) in str(error.value)


@pytest.mark.parametrize(
    ("text", "slot"),
    [
        ("dpn+dpn(before=false)", "stem norm after"),
        ("hmlp+dpn", "stem norm"),
        ("normformer+subln", "mlp inner norm"),
        ("rms+layernorm", "kind of norm"),
        ("placement(attn=post,reading=branch)+normformer", "attn norm on branch"),
        ("placement(attn=post)+placement(mlp=post)", "attn norm before"),
        ("dtn(blocks=1)+placement(attn=post)", "attn norm before"),
        ("layerscale+layerscale(init=1.0)", "layer scale"),
    ],
)
def test_two_changes_for_one_slot_are_an_error_naming_both(text, slot):
    first, second = vm.parse_changes(text)
    with pytest.raises(SlotConflict, match=slot) as error:
        vm.apply(vm.vit("mu2/4", img_size=8), first, second)
    assert f"'{first}'" in str(error.value)
    assert f"'{second}'" in str(error.value)


TEXTS = {
    "": (),
    "base": (),
    "  ": (),
    "dpn": (vm.DualPatchNorm(),),
    "DPN": (vm.DualPatchNorm(),),
    "dual_patchnorm": (vm.DualPatchNorm(),),
    "dpn( before = False , eps=1e-05 )": (vm.DualPatchNorm(before=False, eps=1e-5),),
    "dpn(after_position)": (vm.DualPatchNorm(after_position=True),),
    "rms": (vm.Norm("rms"),),
    "layernorm": (vm.Norm("layer"),),
    "norm(kind=rms)": (vm.Norm("rms"),),
    "norm(kind=rms,exact=false)": (vm.Norm("rms", exact=False),),
    "rms(exact=false)": (vm.Norm("rms", exact=False),),
    "norm(rms,exact=false)": (vm.Norm("rms", exact=False),),
    "norm(batch)": (vm.Norm("batch"),),
    "postnorm": (vm.Placement(attn="post", mlp="post"),),
    "postnorm(mlp=pre+post)": (vm.Placement(attn="post", mlp="pre+post"),),
    "placement(attn=post,mlp=pre+post)": (vm.Placement(attn="post", mlp="pre+post"),),
    "layerscale(init=1e-5)": (vm.LayerScale(1e-5),),
    "dpn+placement(attn=post,mlp=pre+post)+rms": (
        vm.DualPatchNorm(), vm.Placement("post", "pre+post"), vm.Norm("rms")
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_short_forms(text):
    assert vm.parse_changes(text) == TEXTS[text]


@given(st.text(st.sampled_from("dpnrmsubl()+=,. ftrue_1e-5"), max_size=20) | st.text(max_size=20))
def test_no_text_fails_otherwise_than_with_a_user_error(text):
    try:
        changes = vm.parse_changes(text)
    except UserError:
        return
    assert vm.parse_changes("+".join(map(str, changes))) == changes
