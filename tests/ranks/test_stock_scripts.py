"""Scripts in the style of Horovod's documentation train right on this engine, or end in a clear refusal."""

from __future__ import annotations

import json

import pytest
from frameworks.cases import Case
from support.joint import largest_difference, train_jointly
from support.pools import CONTROLLERS

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("framework", ["keras on tensorflow"])
@pytest.mark.parametrize("module", ["horovod.keras", "horovod.tensorflow.keras"])
def test_the_keras_wrapper_is_refused_under_keras_3(framework, module, pools, tmp_path):
    pool = pools.get(framework, 2, CONTROLLERS[framework])

    for rank in pool.run("stock_keras.py", module, folder=tmp_path, check=False):
        assert rank["code"] != 0
        assert "trained" not in rank["output"]
        assert "does not average gradients under Keras 3" in rank["output"]
        assert "from horovod_train.plugins.keras import distribute, init" in rank["output"]


@pytest.mark.parametrize("framework", ["tensorflow"])
def test_a_gradient_tape_over_keras_3_variables_trains_like_one_process(framework, pools, tmp_path):
    pool = pools.get(framework, 2, CONTROLLERS[framework])
    pool.run("stock_tensorflow.py", str(tmp_path), folder=tmp_path)
    expected, _ = train_jointly(Case("sgd", num_samples=48), 2, framework="tensorflow", epochs=1)

    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))

    assert first == second
    assert largest_difference(first, expected.values()) <= 1e-6
