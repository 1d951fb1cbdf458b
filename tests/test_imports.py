"""No circle of files anywhere: imports inside functions count too."""

import ast
import graphlib
import tomllib
from pathlib import Path

import grimp

import vitmods
from vitmods.tasks import TASKS


def arrows(graph):
    """Module -> what it imports; an ``__init__`` may gather the files of its own folder."""
    for module in graph.modules:
        found = graph.find_modules_directly_imported_by(module)
        yield module, {other for other in found if not other.startswith(f"{module}.")}


def test_there_is_no_circle_of_files():
    graph = grimp.build_graph("vitmods", exclude_type_checking_imports=True, cache_dir=None)
    assert len(graph.modules) > 100
    list(graphlib.TopologicalSorter(dict(arrows(graph))).static_order())  # CycleError names the files


def test_a_circle_would_be_found():
    graph = grimp.build_graph("vitmods", exclude_type_checking_imports=True, cache_dir=None)
    graph.add_import(importer="vitmods.util.errors", imported="vitmods.cli.compare")
    try:
        graphlib.TopologicalSorter(dict(arrows(graph))).prepare()
    except graphlib.CycleError:
        return
    raise AssertionError("the circle was not found")


def compared_strings(code):
    """The strings that comparisons of Python code read, with their lines."""
    comparisons = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Compare | ast.MatchValue))
    parts = ((part, node.lineno) for node in comparisons for part in ast.walk(node))
    return [
        (part.value, line) for part, line in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]


def test_the_core_does_not_compare_names_of_tasks():
    root = Path(vitmods.__file__).parent
    leaves = [root / "papers", root / "analysis", *(path for path in (root / "tasks").iterdir() if path.is_dir())]
    core = [path for path in root.rglob("*.py") if not any(path.is_relative_to(leaf) for leaf in leaves)]
    assert len(core) > 100
    places = [f"{path}:{line}" for path in core for name, line in compared_strings(path.read_text()) if name in TASKS]
    assert not places
    assert compared_strings('task in ("dino", x)') == [("dino", 1)]


def test_contracts_name_every_task_of_its_own_folder():
    root = Path(vitmods.__file__).parent
    folders = {f"vitmods.tasks.{path.parent.name}" for path in (root / "tasks").glob("*/__init__.py")}
    assert len(folders) > 5
    configured = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["tool"]["importlinter"]
    contracts = {contract["name"]: contract for contract in configured["contracts"]}
    assert folders == set(contracts["The core never imports a task of its own folder"]["forbidden_modules"])
    assert folders == set(contracts["Tasks do not import each other"]["modules"])
