"""Any one file of a finished study is damaged: it is named, or told in a warning, and all else is still reported."""

import json
import shutil
import warnings

import pytest

from vitmods.data.splits import SPLIT_FILE
from vitmods.recipes import plain
from vitmods.study import Answer, Study
from vitmods.util.errors import UserError

pytestmark = pytest.mark.usefixtures("short_clocks")

RECIPE = plain(epochs=1).with_(batch_size=32)
TRIAL = "trials/dpn/seed0"
DAMAGES = {
    "half": lambda whole: whole[: len(whole) // 2],
    "other": lambda whole: b'{"base": [1], "arms": {"dpn": 3}}',
    "nested": lambda whole: b"[" * 100_000,
}


def study(**options):
    # The expected calibration error is measured after training: the trials have a test.json.
    given = {"recipe": RECIPE, "limit_train": 64, "data": "digits", "seeds": 2, "metric": "ece"}
    return Study("mu/4", ["dpn"], **{**given, **options})


def run(study, out):
    return study.run(out, workers=1, device="cpu", cost_seconds=0.01, progress=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """With images that belong together, so that images.npz and split.csv have groups."""
    out = tmp_path_factory.mktemp("study") / "out"
    answer = run(study(group_by=r"\d\d$"), out)
    (out / TRIAL / "warnings.json").write_text('["odd"]')
    return Answer.load(out) if answer.complete else None, out


@pytest.fixture
def copy(finished, tmp_path):
    return shutil.copytree(finished[1], tmp_path / "copy")


def damage(path, how):
    path.write_bytes(DAMAGES[how](path.read_bytes()))


def load(path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answer = Answer.load(path)
    return answer, " ".join(str(one.message) for one in caught if issubclass(one.category, UserWarning))


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("name", ["config.json", "result.json", "test.json", "test.npz", "val.npz"])
def test_a_trial_with_a_damaged_file_is_missing_and_the_others_count(finished, copy, name, how):
    damage(copy / TRIAL / name, how)
    answer, _ = load(copy)
    if (name, how) == ("config.json", "other"):  # the report reads its environment alone
        assert repr(answer.effects) == repr(finished[0].effects)
        return
    assert (answer["dpn"].n, answer.complete) == (1, False)
    assert answer.base.scores == finished[0].base.scores
    if (name, how) != ("test.json", "other"):  # no protocols in it: it is measured again
        assert name in answer.failed[0] or TRIAL in answer.failed[0]


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("name", ["metrics.jsonl", "warnings.json"])
def test_what_a_trial_has_beside_its_scores_is_decoration(finished, copy, name, how):
    damage(copy / TRIAL / name, how)
    answer, _ = load(copy)
    assert repr(answer.effects) == repr(finished[0].effects)
    assert answer.complete
    assert name == "metrics.jsonl" or "warnings.json is damaged" in answer.report().read_text() or how == "other"


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("name", ["costs.json", "images.npz", "samples.npz", SPLIT_FILE, "results.json", "results.csv"])
def test_what_the_study_has_beside_its_trials_does_not_stop_the_report(finished, copy, name, how):
    damage(copy / name, how)
    answer, told = load(copy)
    assert repr(answer.effects) == repr(finished[0].effects)
    assert answer.complete
    if name in ("costs.json", "samples.npz"):
        assert f"{name} is damaged" in told
        run(study(group_by=r"\d\d$"), copy)
        assert (load(copy)[1] == "") is (name == "costs.json")


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_study_json_is_named(copy, how):
    damage(copy / "study.json", how)
    with pytest.raises(UserError, match=r"study\.json is damaged"):
        Answer.load(copy)


def test_groups_are_those_of_the_split_file_and_the_next_run_writes_both_again(finished, copy):
    (copy / "images.npz").write_bytes(b"PK")
    whole = (copy / SPLIT_FILE).read_bytes()
    (copy / SPLIT_FILE).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"images\.npz is damaged, and split\.csv cannot take its place.*same command"):
        Answer.load(copy)
    assert repr(run(study(group_by=r"\d\d$"), copy).effects) == repr(finished[0].effects)
    for name in ("images.npz", SPLIT_FILE):
        assert (copy / name).read_bytes() == (finished[1] / name).read_bytes()


JUNK = (None, 3, 2.5, True, "x", [], [1], {}, {"a": None})


def damaged_sections(whole):
    """(where, what study.json holds): each section as something else or missing, and what sections hold likewise."""
    for section, value in whole.items():
        yield section, {name: other for name, other in whole.items() if name != section}
        for junk in JUNK:
            yield f"{section}={junk!r}", {**whole, section: junk}
        for name in value if isinstance(value, dict) else ():
            yield f"{section}.{name}", {**whole, section: {n: v for n, v in value.items() if n != name}}
            for junk in (None, 3, "x", [], {"a": None}):
                yield f"{section}.{name}={junk!r}", {**whole, section: {**value, name: junk}}


def test_whatever_a_section_of_study_json_holds_is_read_or_refused(copy):
    path, said, odd = copy / "study.json", {}, {}
    whole = json.loads(path.read_text())
    for where, values in damaged_sections(whole):
        path.write_text(json.dumps(values))
        try:
            load(copy)
        except UserError as error:
            said[where] = str(error)
        except Exception as error:
            odd[where] = repr(error)
    assert not odd
    assert len(said) > 100
    assert {
        where for where, text in said.items() if "study.json" not in text and "." not in where.partition("=")[0]
    } == set()
