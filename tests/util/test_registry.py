"""Named things of one kind: the nearest name, no name twice, files of a folder, a user's modules."""

import json
import subprocess
import sys

import pytest

from vitmods.util import registry
from vitmods.util.errors import UserError, nearest
from vitmods.util.registry import Registry, asked_for, check_plugins, check_reachable, load_plugins, plugins


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """The registries of these tests are forgotten after them: what they hold would count as plugins elsewhere."""
    monkeypatch.setattr(registry, "_registries", list(registry._registries))


def test_the_nearest_name_is_suggested_also_for_other_words():
    """Letters that changed places come before other names."""
    metrics = ["top1", "balanced_accuracy"]
    assert nearest("dnp", ["dtn", "dpn", "norm"]) == "Did you mean 'dpn'?"
    assert nearest("nrom", ["dpn", "norm"]) == "Did you mean 'norm'?"
    assert nearest("acuracy", metrics, {"accuracy": "top1"}) == "Did you mean 'top1'?"
    assert nearest("xyz", ["top1"], {"accuracy": "top1"}) == "Known: top1."


def test_an_unknown_name_is_a_user_error_with_the_nearest():
    metrics: Registry[int] = Registry("metric", advice="`vitmods evaluate --help` lists all.")
    metrics.add("top1", 1, words=("accuracy",))
    with pytest.raises(UserError, match=r"Unknown metric 'accuracy'. Did you mean 'top1'\? `vitmods evaluate"):
        metrics["accuracy"]
    assert "accuracy" not in metrics
    assert metrics.get("accuracy") is None
    assert dict(metrics) == {"top1": 1}


def test_a_second_thing_of_a_name_is_refused_naming_both():
    changes: Registry[type] = Registry("change")

    @changes.register("dpn")
    class First:
        pass

    changes.add("dpn", First)  # the same may come again

    class Second:
        pass

    with pytest.raises(UserError, match=r"Two changes are called 'dpn': .*First and .*Second. Rename one of them"):
        changes.add("dpn", Second)

    assert changes["dpn"] is First
    changes.remove("dpn")
    changes.add("dpn", Second)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    package = tmp_path / "things"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from vitmods.util.registry import Registry\nTHINGS = Registry('thing', 'things')\n"
    )
    (package / "one.py").write_text("from things import THINGS\nTHINGS.add('one', 1)\n")
    (package / "two.py").write_text("from things import THINGS\nTHINGS.add('two', 2)\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [n for n in sys.modules if n.partition(".")[0] in ("things", "mine")]:
        del sys.modules[name]


def test_the_files_of_the_folder_are_found_when_the_names_are_read(folder):
    from things import THINGS

    assert "things.one" not in sys.modules
    assert list(THINGS) == ["one", "two"]


def test_a_file_that_fails_says_so_each_time(folder):
    from things import THINGS

    (folder / "things" / "wrong.py").write_text("1 / 0\n")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            list(THINGS)


def test_a_plugin_may_be_a_file_or_a_name_of_the_working_directory(folder, tmp_path, monkeypatch):
    home = tmp_path / "work"
    home.mkdir()
    (home / "mine.py").write_text("from things import THINGS\nTHINGS.add('three', 3)\n")
    monkeypatch.chdir(home)
    from things import THINGS

    assert "three" not in THINGS
    load_plugins(["mine", str(home / "mine.py")])  # the same file twice
    assert THINGS["three"] == 3
    assert str(home / "mine.py") in plugins()  # another process may run elsewhere


def test_a_plugin_that_is_missing_or_broken_is_a_user_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"The plugin 'nowhere_at_all' does not exist: .*PYTHONPATH"):
        load_plugins(["nowhere_at_all"])
    (tmp_path / "mine.py").write_text("import nowhere_at_all\n")
    with pytest.raises(UserError, match=r"The plugin 'mine' cannot be imported: ModuleNotFoundError: .*nowhere_at_all"):
        load_plugins(["mine"])
    (tmp_path / "json.py").write_text("")
    kept = asked_for.copy()
    with pytest.raises(UserError, match="has the name of the module json"):
        load_plugins([str(tmp_path / "json.py")])
    assert asked_for == kept  # other processes of a training are not told of what is refused


def test_what_the_script_itself_defines_cannot_reach_other_processes():
    things: Registry[int] = Registry("thing")
    check_reachable()
    exec("things.add('three', 3)", {"things": things, "__name__": "__main__"})
    with pytest.raises(UserError, match=r"'three'. Move it to a module .* workers=1"):
        check_reachable()
    assert "__main__" not in plugins()
    things.remove("three")


def test_plugins_that_a_folder_needs_are_asked_for_and_never_loaded(tmp_path):
    check_plugins([], "runs/pets")
    with pytest.raises(
        UserError, match=r"runs/pets was made with plugins: add --plugin elsewhere --plugin /x/there.py"
    ):
        check_plugins(["elsewhere", "/x/there.py"], "runs/pets")


def test_another_process_loads_plugins_in_the_order_in_which_they_were_given(tmp_path):
    """... also one that adds nothing itself, and a file that imports the one before it, whose name comes later."""
    (tmp_path / "zero.py").write_text("SIDE = 3\n")
    (tmp_path / "later.py").write_text("import zero\nfrom vitmods.util.registry import Registry\n"
                                       "THINGS = Registry('thing')\nTHINGS.add('side', zero.SIDE)\n")  # fmt: skip
    (tmp_path / "earlier.py").write_text("import later\nlater.THINGS.add('twice', 2 * later.THINGS['side'])\n")
    imports = "import json, sys; from vitmods.util.registry import load_plugins, plugins"
    ask = f"{imports}; load_plugins(sys.argv[1:]); print(json.dumps(plugins()))"
    given = [str(tmp_path / f"{name}.py") for name in ("zero", "later", "earlier")]
    for _ in range(2):  # the second process gets what the first one says
        done = subprocess.run([sys.executable, "-c", ask, *given], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == given
