"""What a Keras job makes of a task's batches and of its ``compile()``."""

from __future__ import annotations

import subprocess
import sys

import pytest

PRELUDE = """
import keras, numpy as np
from horovod_train.errors import UserError
from horovod_train.plugins.keras.back_ends.tensorflow import TensorflowBackEnd
from horovod_train.plugins.keras.framework import check_joint_loss, check_reduction
from horovod_train.plugins.frameworks.variables import refuse_synchronized
from types import SimpleNamespace
"""
STREAM = (
    PRELUDE
    + """
from horovod_train.plugins.keras.data import as_dataset

def batches(sizes, widths):
    for number, (size, width) in enumerate(zip(sizes, widths)):
        x = {"a": np.full((size, width), number, np.float32), "b": np.full((size, 3, 2), number, np.int64)}
        yield x, np.full(size, number), np.ones(size, np.float32)

for sizes, widths in [([4, 4, 2], [5, 5, 5]), ([4], [5]), ([4, 3, 2, 1], [5, 6, 7, 8])]:
    given = list(batches(sizes, widths))
    read = list(as_dataset(iter(given)).as_numpy_iterator())
    assert len(read) == len(given)
    for one, other in zip(given, read):
        for left, right in zip(keras.tree.flatten(one), keras.tree.flatten(other)):
            assert left.dtype == right.dtype
            np.testing.assert_array_equal(left, right)
"""
)
MOMENTUM = (
    PRELUDE
    + """
from horovod_train.plugins.frameworks.variables import correct_momentum

rates, gradients = [0.1, 0.2, 0.2, 0.05, 0.4], np.random.RandomState(0).randn(5, 3)
for nesterov in (False, True):
    weight = keras.Variable(np.ones(3), dtype="float64")
    optimizer = keras.optimizers.SGD(rates[0], momentum=0.9, nesterov=nesterov)
    optimizer.build([weight])
    expected, velocity = np.ones(3), np.zeros(3)
    for rate, gradient in zip(rates, gradients):
        correct_momentum(optimizer, rate)
        optimizer.learning_rate = rate
        optimizer.apply([keras.ops.convert_to_tensor(gradient)], [weight])
        velocity = 0.9 * velocity + gradient  # the form of PyTorch, whose momentum does not contain the rate
        expected = expected - rate * (gradient + 0.9 * velocity if nesterov else velocity)
        np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-6, atol=1e-6)
"""
)
ACCUMULATION = (
    PRELUDE
    + """
from horovod_train.collectives.base import SingleRank
from horovod_train.plugins.frameworks.variables import VariablesReplica

def replica(num_micro_batches, scaled):
    keras.utils.set_random_seed(0)
    keras.backend.clear_session()
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.1, gradient_accumulation_steps=num_micro_batches)
    optimizer = keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer
    optimizer.build(model.trainable_variables)
    return VariablesReplica(model, optimizer, SingleRank(), [])

def step(replica, number, num_micro_batches):
    for part in np.split(np.random.RandomState(number).randn(6, 3), num_micro_batches or 1):
        gradients = [part.mean(0)[:2, None], part.mean(0)[2:]]
        scale = replica.optimizer.scale_loss(1.0) if hasattr(replica.optimizer, "scale_loss") else 1.0
        replica.optimizer.apply(
            [keras.ops.convert_to_tensor(g.astype(np.float32)) * scale for g in gradients],
            replica.model.trainable_variables,
        )

for scaled in (False, True):
    whole, changing = replica(None, scaled), replica(None, scaled)
    for number, num_micro_batches in enumerate([None, 2, 2, 3, 6, None, 2]):
        step(whole, number, None)
        following = replica(num_micro_batches, scaled)
        following.load_state(changing.state(copy=True))
        changing = following
        step(changing, number, num_micro_batches)
    for one, other in zip(whole.model.variables, changing.model.variables):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5, atol=1e-6)
"""
)
ALLOCATOR = (
    PRELUDE
    + """
import ctypes
from horovod_train.plugins.keras.data import as_dataset

class Blocks(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Blocks
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")

def batches():
    for _ in range(3):
        yield np.ones((4, 5), np.float32), np.ones((4, 1), np.float32)

def is_new_memory(size_mib):
    for _ in range(2):  # freeing one block of a size teaches glibc to keep the next one
        before = libc.mallinfo2().hblks
        block = libc.malloc(size_mib << 20)
        is_new = libc.mallinfo2().hblks > before
        libc.free(block)
    return is_new

model.fit(as_dataset(batches()), verbose=0)
assert not is_new_memory(8)
model.fit(batches(), verbose=0)
assert is_new_memory(16)  # larger: what was kept until now may be given again
"""
)
EXIT = (
    PRELUDE
    + """
import sys, time
from itertools import count
from horovod_train.plugins.keras.data import open_dataset

def batches():
    for number in count():
        time.sleep(1.0 if number > 4 else 0)  # a thread still reads ahead when the process ends
        yield np.ones((4, 5), np.float32), np.ones((4, 1), np.float32)

class Fails(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            raise ValueError("in a callback")

    on_test_batch_end = on_train_batch_end

if "unfiltered" in sys.argv:
    keras.config.disable_traceback_filtering()
model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
def attempt():
    try:
        with open_dataset(batches()) as data:
            if "evaluate" in sys.argv:
                model.evaluate(data, verbose=0, steps=20, callbacks=[Fails()])
            else:
                model.fit(data, verbose=0, steps_per_epoch=20, callbacks=[Fails()])
    except ValueError as error:
        if "kept" in sys.argv:
            sys.kept = error
        return str(error)

print(attempt())
"""
)
COMPILE = (
    PRELUDE
    + """
check_reduction(keras.losses.MeanSquaredError())
check_reduction({"a": "mse", "b": keras.losses.MeanSquaredError()})
try:
    check_reduction([keras.losses.MeanSquaredError(reduction="sum")])
except UserError as error:
    assert "has reduction 'sum'" in str(error), error
else:
    raise AssertionError

from horovod_train.plugins.keras.framework import refuse_joined_steps

refuse_joined_steps({})
refuse_joined_steps({"steps_per_execution": 1})
try:
    refuse_joined_steps({"steps_per_execution": 8})
except UserError as error:
    assert "steps_per_execution=8" in str(error), error
else:
    raise AssertionError

for asked in ({}, {"jit_compile": "auto"}, {"jit_compile": False}):
    TensorflowBackEnd().check_compile(asked)
    assert asked == {"jit_compile": False}
try:
    TensorflowBackEnd().check_compile({"jit_compile": True})
except UserError as error:
    assert "XLA cannot compile" in str(error), error
else:
    raise AssertionError
"""
)
JOINT = (
    PRELUDE
    + """
layers, loss = keras.layers, keras.losses.SparseCategoricalCrossentropy(from_logits=True)
tokens = np.array([[1, 2, 0]])

class Adds(layers.Layer):
    def call(self, x):
        self.add_loss(keras.ops.mean(x))
        return x

def sequential(*members):
    tokens = keras.Input((3,), batch_size=1, dtype="int64")
    return keras.Sequential([tokens, layers.Embedding(5, 4), *members])

def refusal(model, loss=loss):
    try:
        check_joint_loss(model, tokens, loss)
    except UserError as error:
        return str(error)
    return ""

stateful = sequential(layers.GRU(3, stateful=True), layers.Dense(2))
before = [variable.numpy().tolist() for variable in stateful.variables]
assert not refusal(stateful)
assert [variable.numpy().tolist() for variable in stateful.variables] == before
regularized = layers.Dense(2, kernel_regularizer="l2")
assert not refusal(sequential(layers.Flatten(), regularized), {"a": loss, "b": "mse"})
assert "activity_regularizer" in refusal(sequential(layers.Dense(2, activity_regularizer="l2")))
assert "add_loss" in refusal(sequential(Adds(), layers.Dense(2)))
masked = keras.Sequential([keras.Input((3,), dtype="int64"), layers.Embedding(5, 4, mask_zero=True)])
last = keras.Sequential([masked, layers.GRU(3), layers.Dense(2)])
assert "mask_zero" in refusal(keras.Sequential([masked, layers.Dense(2)]))
assert not refusal(last), "the mask ends where the last state is taken"
ignoring = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
assert "ignore_class" in refusal(last, [ignoring])

def refused(layer, size):
    try:
        refuse_synchronized([layer], SimpleNamespace(size=size))
    except UserError as error:
        return str(error)
    return ""

if keras.backend.backend() == "tensorflow":  # Keras itself refuses it on other back ends
    synchronized = layers.BatchNormalization(synchronized=True, name="bn")
    assert "the layer 'bn' has synchronized=True" in refused(synchronized, 2)
    assert not refused(synchronized, 1)
assert not refused(layers.BatchNormalization(), 2)
"""
)

UNUSED = (
    PRELUDE
    + """
from types import SimpleNamespace
from horovod_train.collectives.base import SingleRank
from horovod_train.plugins.keras.optimizer import distribute

class Recorder:
    names = []

    def mean(self, gradients, name):
        self.names.append(name)
        return gradients

optimizer = distribute(keras.optimizers.SGD(0.1), SingleRank())
optimizer._horovod = SimpleNamespace(size=2, rank=0), Recorder()
experts = [keras.Variable(np.ones(3)) for _ in range(2)]
optimizer.build(experts)
gradient = keras.ops.ones(3)
for gradients in [gradient, gradient], [gradient, None], [None, gradient]:
    optimizer.apply(gradients, experts)
all_used, first, second = Recorder.names
assert all_used == "gradients"
assert first != second, "ranks that use different experts must not sum their gradients"
"""
)


def run(program: str, back_end: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={"KERAS_BACKEND": back_end, "PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_batches_come_out_of_the_dataset_as_they_went_in():
    run(STREAM, "tensorflow")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at glibc's allocator")
def test_training_leaves_the_memory_allocator_alone_where_keras_would_not():
    run(ALLOCATOR, "tensorflow")


@pytest.mark.parametrize("way", ["fit", "evaluate", "fit unfiltered kept"])
def test_a_process_exits_after_an_exception_while_the_next_batch_is_read(way):
    assert run(EXIT, "tensorflow", *way.split()) == "in a callback\n"


@pytest.mark.parametrize("back_end", ["tensorflow", "torch", "jax"])
def test_losses_of_a_batch_are_refused_where_ranks_have_parts_of_it(back_end):
    run(JOINT, back_end)


def test_what_compile_says_is_refused_where_it_would_train_wrong():
    run(COMPILE, "jax")


@pytest.mark.parametrize("back_end", ["tensorflow", "torch"])
def test_gradients_of_different_variables_have_exchanges_of_different_names(back_end):
    run(UNUSED, back_end)


def test_checkpoints_continue_with_another_number_of_micro_batches():
    run(ACCUMULATION, "torch")


@pytest.mark.parametrize("back_end", ["tensorflow", "torch", "jax"])
def test_corrected_momentum_is_that_of_an_sgd_whose_momentum_has_no_rate(back_end):
    run(MOMENTUM, back_end)
