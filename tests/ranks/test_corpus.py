"""Models that are difficult for strategies: each is trained to the weights of one process, or refused.

docs/models.md says which; a model that it says is trained must be.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from corpus.mechanisms import MECHANISMS
from corpus.page import OTHERS_TITLE, title, trained_by
from corpus.run import COLUMNS, STRATEGIES, cases, known_cases
from support.launching import environment
from support.once import once

RUN = Path(__file__).parent.parent / "corpus" / "run.py"
PAGE = Path(__file__).parent.parent.parent / "docs" / "models.md"
NUM_PARTS = 20
REFUSED_AT_MOST = {
    "allreduce": 0.05,
    "zero": 0.05,
    "zero1": 0.05,
    "ddp": 0.05,
    "fsdp": 0.10,
    "deepspeed2": 0.25,
    "deepspeed": 0.25,
    "pipeline": 0.30,
}
LATE = ("allreduce", "zero", "fsdp", "deepspeed2", "deepspeed", "pipeline")
pytestmark = pytest.mark.ranks


def trained(folder, *options, at_once=1):
    """Train a part of the corpus; return what was seen, by case, strategy, ranks and settings.

    Args:
        folder: For what is seen.
        options: Of run.py.
        at_once: So many processes share the part: ranks of small models wait more than they compute.
    """
    started = []
    for number in range(at_once):
        out = folder / f"results-{number}.json"
        command = [sys.executable, RUN, "--out", out, "--share", f"{number}/{at_once}", *options]
        started.append((out, subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL)))
    assert [process.wait() for _, process in started] == [0] * at_once
    return {key: found for out, _ in started for key, found in json.loads(out.read_text()).items()}


def wrong(results):
    """Return what must not occur, with the output of the job."""
    return {key: found for key, found in results.items() if found["what"] not in ("equal", "refused")}


def rows(page):
    """Return the cells of each row of the page, by its title."""
    lines = (line for line in page.splitlines() if line.startswith("| "))
    return {cells[0]: cells[1:] for cells in ([c.strip() for c in line.split("|")[1:-1]] for line in lines)}


def refused_pairs(results):
    return {tuple(key.split()[:2]) for key, found in results.items() if found["what"] == "refused"}


def test_a_thirtieth_of_the_models_is_trained_as_one_process_does_or_is_refused(tmp_path):
    strategies = ["--strategy", *STRATEGIES, "--settings", "easy"]
    results = trained(tmp_path, "--part", "3/30", *strategies, at_once=2)

    assert len(results) >= 50
    assert not wrong(results)
    assert not refused_pairs(results) & trained_by(PAGE.read_text(), cases(), COLUMNS)


def test_what_begins_late_is_trained_as_one_process_does_or_is_refused(tmp_path):
    results = trained(tmp_path, "--group", "late", "--strategy", *LATE, "--settings", "easy", at_once=2)

    told = results.pop("LateRow fsdp 2 easy")  # PyTorch loses the write, and only counts it
    assert "up.weight is written during a pass" in " ".join(told["output_of_rank_0"].split())
    assert len(results) == 6 * len(LATE)
    assert not wrong(results)
    of_replicas = {key for key in results if key.split()[1] in ("allreduce", "zero")}
    assert {key.split()[0] for key in of_replicas if results[key]["what"] == "refused"} == {"LateMaxNorm"}


def trained_known(folder, *options):
    """Train models that many people train; return what was seen, by name of the case and number of ranks."""
    results = trained(
        folder, "--group", "known", "--strategy", "allreduce", "--settings", "easy", *options, at_once=2
    )
    return {(key.split()[0], int(key.split()[2])): found for key, found in results.items()}


def test_models_that_many_people_train_are_those_of_one_process_or_are_told_with_a_remedy(
    tmp_path,
):
    found = trained_known(tmp_path, "--ranks", "1", "2", "3")
    told = {name: case.told for name, case in known_cases().items() if case.told}

    assert len(found) == 3 * len(known_cases())
    # SimCLROwn is compared with a process that splits each batch as ranks do.
    assert {name for (name, _), each in found.items() if each["what"] != "equal"} == told.keys() - {
        "SimCLROwn"
    }
    for (name, num_ranks), each in found.items():
        text = " ".join((each.get("output_of_rank_0") or each["output"]).split())
        assert (bool(told.get(name)) and num_ranks > 1) or "Hint:" not in text, text
        assert num_ranks == 1 or told.get(name, "") in text, text


def test_losses_that_compare_samples_are_those_of_one_process_where_gradients_are_summed(tmp_path):
    wanted = ("--group", "known", "--settings", "easy")
    strategies = ("ddp", "zero", "fsdp", "deepspeed2", "deepspeed")
    found = trained(tmp_path, *wanted, "--case", "SimCLR", "--strategy", *strategies, at_once=2)
    # In pipelines, a task calls its model once.
    meshes = ("--strategy", "stages", "tensors", "--case", "Reinforce", "--ranks", "4")
    found |= trained(tmp_path, *wanted, *meshes, at_once=2)

    assert len(found) == len(strategies) + 2
    assert {each["what"] for each in found.values()} == {"equal"}


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "settings"),
    [
        ("deepspeed2", 2, "easy"),
        ("deepspeed", 2, "easy"),
        ("pipeline", 2, "hard"),  # of several micro-batches
        ("stages", 4, "easy"),
        ("tensors", 4, "easy"),
        pytest.param("shards", 4, "easy", marks=pytest.mark.campaign),
        pytest.param("ddp", 3, "hard", marks=pytest.mark.campaign),
        pytest.param("fsdp", 3, "hard", marks=pytest.mark.campaign),
    ],
)
def test_no_strategy_trains_a_mean_over_tokens_in_silence(tmp_path, strategy, num_ranks, settings):
    wanted = ("--group", "known", "--case", "Bert", "BertMean", "ReinforceOwn", "--settings", settings)
    found = trained(tmp_path, *wanted, "--strategy", strategy, "--ranks", str(num_ranks), at_once=2)

    of_case = {key.split()[0]: each for key, each in found.items()}
    assert of_case["Bert"]["what"] == "equal"
    assert of_case["BertMean"]["what"] == "refused"
    assert "return a sum and a count" in " ".join(of_case["BertMean"]["output"].split())
    assert "ReinforceOwn" not in of_case or "task.baseline" in of_case["ReinforceOwn"]["output_of_rank_0"]


@pytest.mark.parametrize("num_ranks", [2, *(pytest.param(n, marks=pytest.mark.campaign) for n in (1, 3))])
def test_models_that_many_people_train_lose_nothing_when_a_rank_is_killed(tmp_path, num_ranks):
    names = [name for name, case in known_cases().items() if not case.told]
    found = trained_known(tmp_path, "--ranks", str(num_ranks), "--kill", "--case", *names)

    assert len(found) == len(names)
    assert not wrong(found)
    assert all("resumed from step-" in each["output_of_rank_0"] for each in found.values())


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_all_models_are_trained_as_one_process_does_or_are_refused_as_the_page_says(tmp_path, part):
    results = trained(tmp_path, "--part", f"{part}/{NUM_PARTS}", "--ranks", "2", "3", at_once=2)
    pairs = {tuple(key.split()[:2]) for key in results}

    assert not wrong(results)
    assert refused_pairs(results) == pairs - trained_by(PAGE.read_text(), cases(), COLUMNS)


OTHERS = {
    "Keras on TensorFlow": ("keras", "tensorflow"),
    "Keras on PyTorch": ("keras", "torch"),
    "Keras on JAX": ("keras", "jax"),
    "TensorFlow": ("tensorflow", "tensorflow"),
    "JAX": ("jax", "jax"),
}


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("column", OTHERS)
def test_all_models_of_another_framework_are_trained_as_one_process_does(tmp_path, column):
    framework, back_end = OTHERS[column]
    out = tmp_path / "results.json"
    command = [sys.executable, RUN.parent / "others.py", framework, "--ranks", "2", "3", "--out", out]
    subprocess.run(command, env=environment(KERAS_BACKEND=back_end), check=True)
    results = json.loads(out.read_text())
    names = {key.split()[0] for key in results}
    place = list(OTHERS).index(column)
    of_page = {
        title
        for title, cells in rows(PAGE.read_text().partition(OTHERS_TITLE)[2]).items()
        if cells[place] == "yes"
    }

    assert len(names) >= 30
    assert not wrong(results)
    assert names == of_page


@pytest.mark.parametrize("strategy", REFUSED_AT_MOST)
def test_few_models_are_refused(strategy):
    """Models with fewer layers than a pipeline has stages do not count."""
    text = PAGE.read_text()
    too_few = re.findall(r"^(\d+)\. .*has no parameter that is trained", text, re.MULTILINE)
    to_be_trained = {title(case) for case in cases().values() if not case.is_refused}
    place = COLUMNS.index(strategy)
    cells = [
        each[place] for name, each in rows(text.partition(OTHERS_TITLE)[0]).items() if name in to_be_trained
    ]
    refused = [cell for cell in cells if cell.isdecimal() and cell not in too_few]
    num_trained = sum(each == strategy for _, each in trained_by(text, cases(), COLUMNS))

    assert len(refused) <= REFUSED_AT_MOST[strategy] * (num_trained + len(refused))


AT_HOME = ["ranks agree on the path", "weights that are changed by functional_call, in stages"]


@pytest.fixture(scope="module")
def without_mechanisms(tmp_path_factory):
    """What became of models without one mechanism each, by its name; made when it is wanted."""

    @once
    def made(names):
        out = tmp_path_factory.mktemp("mechanisms") / "results.json"
        command = [sys.executable, RUN.parent / "mechanisms.py", "--out", out, *names]
        subprocess.run(command, env=environment(), check=True)
        return json.loads(out.read_text())

    return made


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in AT_HOME else pytest.mark.campaign) for name in MECHANISMS],
)
def test_a_mechanism_alone_stands_between_a_model_and_other_weights(without_mechanisms, name):
    found = without_mechanisms(tuple(AT_HOME) if name in AT_HOME else tuple(MECHANISMS))[name]

    assert found["alone"]["what"] == "WRONG"
    assert found["verified"]["what"] == ("refused" if MECHANISMS[name].is_found else "WRONG")


def test_each_model_has_a_row_on_the_page():
    text = PAGE.read_text()
    rows = {line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")}
    trained = {name for name, _ in trained_by(text, cases(), COLUMNS)}

    assert not {name for name, case in cases().items() if name not in trained and title(case) not in rows}
