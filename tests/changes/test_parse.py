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


@given(st.text(st.sampled_from("dpnrmsubl()+=,. ftrue_1e-5"), max_size=20) | st.text(max_size=20))
def test_no_text_fails_otherwise_than_with_a_user_error(text):
    try:
        changes = vm.parse_changes(text)
    except UserError:
        return
    assert vm.parse_changes("+".join(map(str, changes))) == changes
