"""The documentation says what the code does."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest
import yaml
from support.matrix import renewed
from unit.test_architecture import BASICS, ROOMS

from horovod_train import __version__, errors, registry
from horovod_train.cli.main import COMMANDS
from horovod_train.config.load import job_from
from horovod_train.config.schema import Allreduce, Job
from horovod_train.events.file import FORMAT_VERSION, MAX_BYTES
from horovod_train.lr.policy import policy_of
from horovod_train.telemetry.catalog import CATALOG

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "docs"))
    return module


def test_the_reference_of_jobs_is_up_to_date(generate):
    assert (ROOT / "docs" / "job.md").read_text() == generate.job_reference()


def test_the_page_of_frameworks_is_up_to_date_but_for_its_tables_of_tests():
    page = (ROOT / "docs" / "frameworks.md").read_text()

    assert page == renewed(page)


def test_the_reference_of_arguments_is_up_to_date(generate):
    assert (ROOT / "docs" / "arguments.md").read_text() == generate.arguments_reference()


def test_the_references_of_commands_and_of_python_are_up_to_date(generate):
    assert (ROOT / "docs" / "cli.md").read_text() == generate.cli_reference()
    assert (ROOT / "docs" / "api.md").read_text() == generate.api_reference()


def test_the_annotated_job_is_valid(generate, tmp_path):
    (tmp_path / "spiral.py").write_text("class Spiral: pass\n")
    tree = yaml.safe_load(generate.ANNOTATED_JOB)

    job = job_from(tree, tmp_path, "job.yaml", environ={})

    assert policy_of(job, 8).peak_lr == pytest.approx(0.8)


def test_the_page_of_exit_codes_has_those_of_all_errors():
    page = (ROOT / "docs" / "exit-codes.md").read_text()
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "exit_code")]

    assert {kind.exit_code for kind in kinds} <= {
        int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)
    }


def test_the_reference_of_events_is_up_to_date(generate):
    assert (ROOT / "docs" / "events.md").read_text() == generate.events_reference()
    assert "`format_version` is 1;" in generate.EVENTS
    assert (FORMAT_VERSION, MAX_BYTES) == (1, 16 * 2**20)


def test_the_table_of_metrics_is_up_to_date(generate):
    page = (ROOT / "docs" / "monitoring.md").read_text()

    assert page == generate.monitoring_with_metrics()
    assert all(f"`{metric.name}`" in page for metric in CATALOG)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def anchors_of(page):
    """Return the anchors of a page's headings, as GitHub names them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_sections_lead_to_a_heading(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", text):
        other = page.parent / target if target else page
        assert anchor in anchors_of(other), f"{page.name} links to {target}#{anchor}"


def test_the_table_of_packages_has_what_each_may_import():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = text.partition("## Packages")[2].partition("`tests/unit/test_architecture.py`")[0]
    listed = {}
    for name, cell in re.findall(r"^\| `(.*?)` \| .* \| ([^|]*) \|$", rows, re.MULTILINE):
        listed[name] = set(re.findall(r"`(.*?)`", cell)) | (BASICS if cell.startswith("basics") else set())

    anything = {"cli": {"plugins"}, "plugins": set()}
    assert listed == {
        room: anything[room] if allowed is None else allowed
        for room, allowed in ROOMS.items()
        if not room.startswith("_")
    }


def test_the_glossary_names_files_and_settings_that_exist():
    text = (ROOT / "docs" / "glossary.md").read_text()
    rows = re.findall(r"\| ([^|\n]*) \|$", text, re.MULTILINE)
    places = [name for row in rows for name in re.findall(r"`(.*?)`", row)]

    assert len(places) > 30
    for place in places:
        if "/" in place:
            assert (ROOT / "horovod_train" / place).exists(), place
        else:
            section, field = place.split(".")
            assert field in Job.model_fields[section].annotation.model_fields, place


@pytest.mark.parametrize(
    ("field", "names"),
    [
        ("strategy.name", registry.STRATEGIES.rows),
        ("allreduce.codec", registry.CODECS.rows),
        ("allreduce.wire_dtype", get_args(Allreduce.model_fields["wire_dtype"].annotation)),
        ("launch.launcher", registry.LAUNCHERS.rows),
    ],
)
def test_the_glossary_lists_all_values_of_a_field(field, names):
    text = (ROOT / "docs" / "glossary.md").read_text()
    (listed,) = re.findall(rf"`{re.escape(field)}`: (.*?)\.", text)

    assert sorted(re.findall(r"`(.*?)`", listed)) == sorted(names)


def test_the_tour_lists_all_launchers_and_frameworks():
    readme = (ROOT / "docs" / "tour.md").read_text()
    (launchers,) = re.findall(r"\| launcher \|.*?\n\n", readme, re.DOTALL)
    (frameworks,) = re.findall(r"^Set `framework: (.*?) in the job", readme, re.MULTILINE)

    first_cells = " ".join(re.findall(r"^\| (`.*?) \|", launchers, re.MULTILINE))
    assert set(re.findall(r"`(.*?)`", first_cells)) == {"auto", *registry.LAUNCHERS.rows}
    assert set(re.findall(r"[a-z]+", frameworks)) - {"or"} == set(registry.FRAMEWORKS.builtin) - {"torch"}


def test_the_table_of_strategies_lists_all():
    page = (ROOT / "docs" / "strategies.md").read_text()
    named = set(re.findall(r"^\| `([a-z_]+)`", page.partition("\n\n|")[2].partition("\n\n")[0], re.MULTILINE))

    assert named == set(registry.STRATEGIES.rows)


def test_the_readme_and_the_tour_name_every_verb():
    pages = (ROOT / "README.md").read_text() + (ROOT / "docs" / "tour.md").read_text()
    for verb in COMMANDS:
        assert f"horovod-train {verb}" in pages


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 900


def test_the_index_leads_to_every_page():
    index = (ROOT / "docs" / "README.md").read_text()

    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index


def test_what_the_index_names_in_the_code_is_there():
    index = (ROOT / "docs" / "README.md").read_text()

    for place in re.findall(r"`(horovod_train/[^`]+)`", index):
        assert (ROOT / place).exists()
    for table in re.findall(r"`registry\.(\w+)`", index):
        assert hasattr(registry, table)


def test_an_own_task_fits_in_forty_lines():
    (task,) = re.findall(r"```python file=spiral.py\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)

    assert len(task.splitlines()) <= 40


def test_the_version_is_the_same_everywhere():
    assert f'version="{__version__}"' in (ROOT / "setup.py").read_text()


def test_lint_exceptions_have_their_reasons():
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    codes = [line for line in lines if re.match(r'^\s+"[A-Z]+\d*",', line)]

    assert codes
    assert all("# " in line for line in codes)
    assert tomllib.loads("\n".join(lines))["tool"]["mypy"]["strict"]


MODULES = sorted(
    str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")
    for path in (ROOT / "horovod_train").rglob("*.py")
    if ">>> " in path.read_text()
)


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings_are_true(module):
    found = doctest.testmod(importlib.import_module(module))

    assert found.attempted > 0
    assert found.failed == 0
