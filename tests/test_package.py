"""The front door: what importing costs, and that names mean the same whatever is imported first."""

import subprocess
import sys
from pathlib import Path

import pytest

import vitmods as vm


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


WITHOUT_TORCH = [
    "import vitmods",
    "import vitmods.model.config, vitmods.util.errors; vitmods.model.config.ViTConfig.from_name('S/16').to_json()",
    "import vitmods.changes; str(vitmods.parse_changes('dpn(before=false)+subln+layerscale'))",
    "vitmods.DualPatchNorm().edit(vitmods.ViTConfig())",
    "import vitmods.recipes",
    "import vitmods.evals.options, vitmods.tasks.metrics",
]


def test_describing_models_needs_no_torch():
    """... unless a kind of norm is named, whose facts lie beside its code."""
    heavy = "{'torch', 'timm', 'torchvision', 'scipy', 'sklearn', 'matplotlib', 'PIL'}"
    code = f"import sys\nfor line in {WITHOUT_TORCH}:\n    exec(line)\n    print(sorted({heavy} & set(sys.modules)))"
    assert run(code) == "[]\n" * len(WITHOUT_TORCH)


FIRST = [
    "import vitmods.model.vit",
    "import vitmods.adapters.apply",
    "from vitmods.model.vit import ViT",
    "from vitmods import apply, vit",
    "import vitmods.adapters.apply, vitmods.model.vit, vitmods.model.config",
]
LIBRARIES = {"timm", "torchvision", "transformers", "safetensors", "sklearn", "matplotlib", "scipy"}


def test_functions_are_not_hidden_by_the_files_they_live_in():
    """... whatever is imported first; building and changing models imports no other library than torch."""
    code = f"""
import sys
for first in {FIRST}:
    for name in [n for n in sys.modules if n.startswith("vitmods")]:
        del sys.modules[name]
    exec(first)
    import vitmods as vm
    print(type(vm.apply(vm.vit("mu/4", img_size=8), vm.DualPatchNorm())).__name__)
print(sorted({LIBRARIES} & set(sys.modules)))
vm.adapters.load
import vitmods.report.hub
print(sorted({LIBRARIES} & set(sys.modules)))
"""
    assert run(code).split("\n") == ["ViT"] * len(FIRST) + ["[]", "['scipy']", ""]


def test_every_public_name_is_there_and_listed():
    for name in vm.__all__:
        assert getattr(vm, name) is not None
        assert name in dir(vm)
    assert vm.vit is not None
    assert callable(vm.vit)


def test_every_change_is_a_public_name():
    for kind in vm.changes.REGISTRY.values():
        assert getattr(vm, kind.__name__) is kind
        assert kind.__name__ in dir(vm)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="DualPatchnorm"):
        _ = vm.DualPatchnorm


def test_type_checkers_know_every_change():
    source = Path(vm.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    ours = [kind.__name__ for kind in vm.changes.REGISTRY.values() if kind.__module__.startswith("vitmods.")]
    assert [name for name in ours if f" as {name}\n" not in source] == []
