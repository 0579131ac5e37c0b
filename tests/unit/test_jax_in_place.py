"""Python changes XLA's arrays where they lie, in the order of the program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from horovod_train.plugins.jax.in_place import in_place


def adds(number, seen=None):
    """Return a function that adds a number to all arrays, and notes that it was called."""

    def change(arrays):
        for array in arrays:
            np.add(array, number, out=array)
        if seen is not None:
            seen.append(number)

    return change


def test_arrays_of_every_float_type_and_shape_come_back_changed():
    given = [jnp.ones((2, 3)), jnp.ones(()), jnp.ones(5, jnp.float16), jnp.zeros((0, 4))]
    for compile_ in (jax.jit, lambda function: function):
        found = compile_(lambda arrays: in_place(adds(2), arrays))(given)
        assert [(a.shape, a.dtype) for a in found] == [(a.shape, a.dtype) for a in given]
        assert all((array == 3).all() for array in found)


def test_what_is_still_needed_is_not_overwritten():
    x = jnp.zeros(4)

    @jax.jit
    def both(x):
        y = x * 2
        return y, in_place(adds(1), [y])[0]

    before, after = both(x)
    assert [array.tolist() for array in (x, before, after)] == [[0] * 4, [0] * 4, [1] * 4]


def test_an_argument_of_another_layout_is_seen_row_by_row():
    seen = []
    jax.jit(lambda x: in_place(lambda arrays: seen.append(arrays[0].copy()), [x.T]))(
        jnp.arange(6.0).reshape(2, 3)
    )
    jax.effects_barrier()
    np.testing.assert_array_equal(seen[0], np.arange(6.0).reshape(2, 3).T)


def test_nothing_is_copied_that_nobody_else_needs(monkeypatch):
    addresses = []

    def note(arrays):
        addresses.append(arrays[0].ctypes.data)

    def copies(function):
        return jax.jit(function).lower(x).compile().as_text().count(" copy(%")

    def alone(x):
        return in_place(note, [x.T @ x])[0]  # as the gradient of a layer is made

    def with_the_original(x):
        return x, in_place(note, [x])[0]

    monkeypatch.setattr("ctypes.memmove", None)  # how an argument comes to where its result lies
    x = jnp.ones((30, 40))
    result = jax.jit(alone)(x).block_until_ready()

    assert result.unsafe_buffer_pointer() == addresses[0]
    assert copies(alone) == 0
    assert copies(with_the_original) > 0


def test_calls_that_do_not_depend_on_each_other_keep_the_order_of_the_program():
    seen = []

    @jax.jit
    def program(x):
        return [in_place(adds(number, seen), [x * number])[0] for number in range(20)]

    jax.block_until_ready(program(jnp.ones(3)))
    assert seen == list(range(20))


def test_it_works_in_loops_and_branches():
    @jax.jit
    def program(x, flag):
        x, _ = jax.lax.scan(lambda x, _: (in_place(adds(1), [x])[0], None), x, None, length=5)
        return jax.lax.cond(flag, lambda x: in_place(adds(10), [x])[0], lambda x: x, x)

    assert program(jnp.zeros(2), True).tolist() == [15, 15]
    assert program(jnp.zeros(2), False).tolist() == [5, 5]


def test_an_error_ends_the_program_with_its_text_and_the_next_one_runs():
    def fails(_):
        raise ValueError("no such rank")

    with pytest.raises(jax.errors.JaxRuntimeError, match="ValueError: no such rank"):
        jax.block_until_ready(jax.jit(lambda x: in_place(fails, [x])[0])(jnp.ones(3)))
    assert jax.jit(lambda x: in_place(adds(1), [x])[0])(jnp.ones(3)).tolist() == [2, 2, 2]
