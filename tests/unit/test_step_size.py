"""The code of a training step is short: what is called in each step, found by following calls."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

from programs.cases import Case
from support.torch_threads import Task, on_torch_ranks, run_of

from horovod_train.training.loop import train

PACKAGE = Path(__file__).parents[2] / "horovod_train"
FILES = ("training/loop.py", "frameworks/torch/step/replica.py", "frameworks/torch/step/update.py")
LOOP = ("training/loop.py", "train_epoch")
MAX_LINES = 140  # 57 of them of the loss


def bodies(file):
    """Yield the first line, name and number of lines of code of each function of a file."""
    text = (PACKAGE / file).read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            begin = node.body[0].lineno
            if ast.get_docstring(node) is not None:
                begin = node.body[0].end_lineno + 1
            code = (line.strip() for line in lines[begin - 1 : node.end_lineno])
            num_lines = sum(bool(line) and not line.startswith("#") for line in code)
            yield min([node.lineno, *(each.lineno for each in node.decorator_list)]), node.name, num_lines


def calls_of_a_training(world):
    """Return how often each function of the files was called in a training, and its steps."""
    _, run = run_of(world, Case("sgd", epochs=2, clip=0.5).job("support.torch_threads:Task"))
    calls = Counter()
    files = {str(PACKAGE / file): file for file in FILES}

    def on_event(frame, event, _):
        if event == "call" and (file := files.get(frame.f_code.co_filename)):
            calls[file, frame.f_code.co_firstlineno] += 1

    sys.setprofile(on_event)
    try:
        train(run)
    finally:
        sys.setprofile(None)
    return calls, run.progress.step


def test_the_code_of_a_training_step_is_short():
    Task().model()
    (calls, num_steps), _ = on_torch_ranks(2, calls_of_a_training)
    of_a_step = {
        (file, name): num_lines
        for file in FILES
        for first, name, num_lines in bodies(file)
        if calls[file, first] >= num_steps or (file, name) == LOOP
    }

    assert num_steps > 10
    assert len(of_a_step) > 10
    assert sum(of_a_step.values()) <= MAX_LINES, of_a_step
