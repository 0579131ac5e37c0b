"""Models that are difficult for strategies: each is trained to the weights of one process, or refused.

docs/models.md says which; a model that it says is trained must be.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from corpus.mechanisms import MECHANISMS
from corpus.page import page, title, trained_by
from corpus.run import COLUMNS, STRATEGIES, cases
from support.launching import environment

RUN = Path(__file__).parent.parent / "corpus" / "run.py"
PAGE = Path(__file__).parent.parent.parent / "docs" / "models.md"
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


# Of one setting: every thirtieth pair of a model and a strategy; every tenth one in campaigns.
@pytest.mark.parametrize(
    ("part", "num_pairs"), [("3/30", 50), pytest.param("3/10", 150, marks=pytest.mark.campaign)]
)
def test_a_part_of_the_models_is_trained_as_one_process_does_or_is_refused(tmp_path, part, num_pairs):
    strategies = ["--strategy", *STRATEGIES, "--settings", "easy"]
    results = trained(tmp_path, "--part", part, *strategies, at_once=2)
    said = trained_by(PAGE.read_text(), cases(), COLUMNS)

    assert len(results) >= num_pairs
    assert not wrong(results)
    refused = {tuple(key.split()[:2]) for key, found in results.items() if found["what"] == "refused"}
    assert not refused & said


@pytest.fixture(scope="module")
def whole_corpus(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("corpus"), "--ranks", "2", "3", at_once=2)


@pytest.mark.campaign
def test_every_model_is_trained_as_one_process_does_or_is_refused(whole_corpus):
    assert not wrong(whole_corpus)


OTHERS = {
    "Keras on TensorFlow": ("keras", "tensorflow"),
    "Keras on PyTorch": ("keras", "torch"),
    "Keras on JAX": ("keras", "jax"),
    "TensorFlow": ("tensorflow", "tensorflow"),
    "JAX": ("jax", "jax"),
}


@pytest.fixture(scope="module")
def other_corpora(tmp_path_factory):
    """What was seen of other frameworks, by their names on the page."""
    folder, found = tmp_path_factory.mktemp("others"), {}
    for column, (framework, back_end) in OTHERS.items():
        out = folder / f"{column}.json"
        command = [sys.executable, RUN.parent / "others.py", framework, "--ranks", "2", "3", "--out", out]
        subprocess.run(command, env=environment(KERAS_BACKEND=back_end), check=True)
        found[column] = json.loads(out.read_text())
    return found


@pytest.mark.campaign
def test_every_model_of_another_framework_is_trained_as_one_process_does(other_corpora):
    assert all(len({key.split()[0] for key in results}) >= 30 for results in other_corpora.values())
    assert not any(wrong(results) for results in other_corpora.values())


@pytest.mark.campaign
def test_the_page_of_models_says_what_was_seen(whole_corpus, other_corpora):
    text = page(whole_corpus, cases(), COLUMNS, other_corpora)
    if PAGE.read_text() != text:
        PAGE.write_text(text)
        pytest.fail(f"{PAGE} was not what was seen; it is now: look at it and commit it")


def has_too_few_layers(found):
    """Whether a model has fewer layers with parameters than a pipeline has stages."""
    return "has no parameter that is trained" in found["output"]


@pytest.mark.campaign
@pytest.mark.parametrize("strategy", REFUSED_AT_MOST)
def test_few_models_are_refused(whole_corpus, strategy):
    to_be_trained = {name for name, case in cases().items() if not case.is_refused}
    seen = {key.split()[0] for key in whole_corpus if key.split()[1] == strategy} & to_be_trained
    refused = seen & {
        key.split()[0]
        for key, found in whole_corpus.items()
        if key.split()[1] == strategy and found["what"] == "refused" and not has_too_few_layers(found)
    }

    assert len(refused) <= REFUSED_AT_MOST[strategy] * len(seen), sorted(refused)


AT_HOME = ["ranks agree on the path", "weights that are changed by functional_call, in stages"]


@pytest.fixture(scope="module")
def without_mechanisms(tmp_path_factory):
    """What became of models without one mechanism each, by its name; made when it is wanted."""

    @functools.cache
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
