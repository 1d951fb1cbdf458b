import pytest
from hypothesis import given
from hypothesis import strategies as st

import vitmods as vm
from vitmods.util.errors import UserError


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("", ()),
        ("base", ()),
        ("  ", ()),
        ("dpn", (vm.DualPatchNorm(),)),
        ("DPN", (vm.DualPatchNorm(),)),
        ("dual_patchnorm", (vm.DualPatchNorm(),)),
        ("dpn(before=false)", (vm.DualPatchNorm(before=False),)),
        ("dpn( before = False , eps=1e-05 )", (vm.DualPatchNorm(before=False, eps=1e-5),)),
        ("dpn(after_position)", (vm.DualPatchNorm(after_position=True),)),
        ("rms", (vm.Norm("rms"),)),
        ("layernorm", (vm.Norm("layer"),)),
        ("norm(kind=rms)", (vm.Norm("rms"),)),
        ("norm(kind=rms,exact=false)", (vm.Norm("rms", exact=False),)),
        ("rms(exact=false)", (vm.Norm("rms", exact=False),)),
        ("postnorm", (vm.Placement(attn="post", mlp="post"),)),
        ("postnorm(mlp=pre+post)", (vm.Placement(attn="post", mlp="pre+post"),)),
        ("placement(attn=post,mlp=pre+post)", (vm.Placement(attn="post", mlp="pre+post"),)),
        ("layerscale(init=1e-5)", (vm.LayerScale(1e-5),)),
        ("norm(batch)", (vm.Norm("batch"),)),
        ("norm(rms,exact=false)", (vm.Norm("rms", exact=False),)),
        ("subln(rescale=false)", (vm.SubLN(rescale=False),)),
        (
            "dpn+placement(attn=post,mlp=pre+post)+rms",
            (vm.DualPatchNorm(), vm.Placement("post", "pre+post"), vm.Norm("rms")),
        ),
    ],
)
def test_short_forms(text, changes):
    assert vm.parse_changes(text) == changes


@pytest.mark.parametrize(
    ("text", "says"),
    [
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
    ],
)
def test_mistakes_are_errors_that_say_what_to_do(text, says):
    with pytest.raises(UserError, match=says):
        vm.parse_changes(text)


@given(st.text(st.sampled_from("dpnrmsubl()+=,. ftrue_1e-5"), max_size=20) | st.text(max_size=20))
def test_no_text_fails_otherwise_than_with_a_user_error(text):
    try:
        changes = vm.parse_changes(text)
    except UserError:
        return
    assert vm.parse_changes("+".join(map(str, changes))) == changes
