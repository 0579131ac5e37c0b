"""Costly preparations that several tests share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from horovod_train.errors import result_of

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def once(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Call a function once for each set of arguments, and answer the same each time, also with an exception.

    ``functools.cache`` forgets exceptions: a launch that fails would be repeated by each of a hundred tests.
    """

    @functools.cache
    def tried(*arguments: Arguments.args, **more: Arguments.kwargs) -> tuple[Result | None, Exception | None]:
        return result_of(functools.partial(function, *arguments, **more))

    @functools.wraps(function)
    def answer(*arguments: Arguments.args, **more: Arguments.kwargs) -> Result:
        result, error = tried(*arguments, **more)
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  (None only where the function returned it)

    return answer
