"""Change a model, see what became different, and find out on real images whether it helps. Half a minute on a CPU."""

import sys

import timm

import vitmods as vm


def change_a_model() -> None:
    """A timm model, Dual PatchNorm and RMSNorm: a new model with the old weights."""
    model = timm.create_model("vit_tiny_patch16_224", num_classes=37)
    better = vm.apply(model, vm.DualPatchNorm(), vm.Norm("rms"))
    print(vm.diff(model, better))


def compare_two_arms(out: str) -> None:
    """A very small ViT on scikit-learn's handwritten digits: does either change help here?"""
    study = vm.Study(
        base="mu2/2",
        arms={"rms": [vm.Norm("rms")], "post-norm": [vm.Placement(attn="post", mlp="post")]},
        data="digits",
        recipe=vm.recipes.digits(epochs=8),
        seeds=3,
    )
    result = study.run(out, cost_seconds=1)
    print(result)
    effect = result["post-norm"]
    print(f"\n{effect!r}: {effect.verdict}, on other images {effect.low:+.1f} to {effect.high:+.1f} points")
    print(f"Report: {result.report()}")


if __name__ == "__main__":  # a study starts processes, which import this file
    change_a_model()
    print()
    compare_two_arms(sys.argv[1] if len(sys.argv) > 1 else "runs/quickstart")
