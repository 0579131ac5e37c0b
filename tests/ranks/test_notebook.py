"""The notebook of the documents, executed by a kernel without a browser."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import nbformat
import pytest
from support.launching import BIN, TIMEOUT_S, environment

from horovod_train.events.file import read_events
from horovod_train.events.types import Evaluation

pytestmark = pytest.mark.ranks
NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebook.ipynb"


def test_the_notebook_trains_a_job_and_displays_it(tmp_path):
    shutil.copy(NOTEBOOK, tmp_path)
    folders = {"XDG_STATE_HOME": str(tmp_path / "state"), "IPYTHONDIR": str(tmp_path / "ipython")}
    subprocess.run(
        [BIN / "jupyter-execute", "--inplace", NOTEBOOK.name],
        cwd=tmp_path, env=environment(**folders), check=True, capture_output=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    notebook = nbformat.read(tmp_path / NOTEBOOK.name, as_version=4)

    outputs = {cell.id: cell.get("outputs", []) for cell in notebook.cells}
    (events,) = tmp_path.glob("runs/digits/*/events.jsonl")
    evaluations = [r.event for r in read_events(events) if isinstance(r.event, Evaluation)]
    assert "trained digits: 3 epochs" in "".join(output.text for output in outputs["follow"])
    shown = outputs["handle"][0].data["text/html"]
    assert "succeeded" in shown
    assert "<svg" in shown
    assert str(dict(evaluations[-1].metrics)) in outputs["result"][0].data["text/plain"]
    curves = outputs["curves"][0].data["application/vnd.plotly.v1+json"]["data"]
    assert [curve["name"] for curve in curves] == ["loss", "eval/loss"]


def test_the_notebook_is_stored_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)

    nbformat.validate(notebook)
    assert all(not cell.get("outputs") and not cell.get("execution_count") for cell in notebook.cells)
