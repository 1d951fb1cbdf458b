"""The front door: what importing costs, names that mean the same whatever is imported first, no circle of files, and
the lowest versions that pyproject.toml allows."""

import ast
import graphlib
import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import pytest

import vitmods as vm
from vitmods.tasks import TASKS

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


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


def arrows(graph):
    """Module -> what it imports; an ``__init__`` may gather the files of its own folder."""
    for module in graph.modules:
        found = graph.find_modules_directly_imported_by(module)
        yield module, {other for other in found if not other.startswith(f"{module}.")}


def test_there_is_no_circle_of_files_and_one_would_be_found():
    """Imports inside functions count too."""
    graph = grimp.build_graph("vitmods", exclude_type_checking_imports=True, cache_dir=None)
    assert len(graph.modules) > 100
    graphlib.TopologicalSorter(dict(arrows(graph))).prepare()  # CycleError names the files
    graph.add_import(importer="vitmods.util.errors", imported="vitmods.cli.compare")
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(dict(arrows(graph))).prepare()


def compared_strings(code):
    """The strings that comparisons of Python code read, with their lines."""
    comparisons = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Compare | ast.MatchValue))
    parts = ((part, node.lineno) for node in comparisons for part in ast.walk(node))
    return [
        (part.value, line) for part, line in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]


def test_the_core_does_not_compare_names_of_tasks():
    root = Path(vm.__file__).parent
    leaves = [root / "papers", root / "analysis", *(path for path in (root / "tasks").iterdir() if path.is_dir())]
    core = [path for path in root.rglob("*.py") if not any(path.is_relative_to(leaf) for leaf in leaves)]
    assert len(core) > 100
    places = [f"{path}:{line}" for path in core for name, line in compared_strings(path.read_text()) if name in TASKS]
    assert not places
    assert compared_strings('task in ("dino", x)') == [("dino", 1)]


def test_contracts_name_every_task_of_its_own_folder():
    root = Path(vm.__file__).parent
    folders = {f"vitmods.tasks.{path.parent.name}" for path in (root / "tasks").glob("*/__init__.py")}
    assert len(folders) > 5
    configured = PROJECT["tool"]["importlinter"]
    contracts = {contract["name"]: contract for contract in configured["contracts"]}
    assert folders == set(contracts["The core never imports a task of its own folder"]["forbidden_modules"])
    assert folders == set(contracts["Tasks do not import each other"]["modules"])


def test_the_pins_are_the_lower_bounds():
    spec = importlib.util.spec_from_file_location("minimum", ROOT / "benchmarks/minimum.py")
    minimum = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(minimum)
    assert (ROOT / "requirements-minimum.txt").read_text() == minimum.pins(), "run make minimum-lock"


def test_every_dependency_of_dev_that_users_have_too_has_the_same_bound():
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    users = {line.partition(">=")[0]: line for name, part in extras.items() if name != "dev" for line in part}
    users |= {line.partition(">=")[0]: line for line in project["dependencies"]}
    for line in extras["dev"]:
        assert users.get(line.partition(">=")[0], line) == line
