"""No circle of files anywhere: imports inside functions count too."""

import graphlib

import grimp


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
