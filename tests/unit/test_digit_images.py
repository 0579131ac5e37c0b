"""The images of the shipped tasks: scikit-learn's, without its import."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from sklearn.datasets import load_digits

from horovod_train.tasks import digits as module
from horovod_train.tasks.digits import digit_images


def test_are_those_that_scikit_learn_returns():
    images, labels = digit_images()

    assert np.array_equal(images, load_digits().images)
    assert np.array_equal(labels, load_digits().target)


def test_are_read_without_importing_it():
    code = "import sys, horovod_train.tasks.digits as d; d.Digits(); print('sklearn' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "False"


def test_that_it_is_not_installed_is_said_as_an_import_would(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)

    with pytest.raises(ModuleNotFoundError, match="No module named 'sklearn'"):
        digit_images()
