"""Costly preparations that several tests share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def once(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Call a function once for each set of arguments, and answer the same each time, also with an exception.

    ``functools.cache`` forgets exceptions: a launch that fails would be repeated by each of a hundred tests.
    """
    failures: dict[object, BaseException] = {}

    @functools.cache
    def tried(*arguments: Arguments.args, **more: Arguments.kwargs) -> Result | None:
        try:
            return function(*arguments, **more)
        except Exception as error:  # noqa: BLE001  (raised again below)
            failures[arguments, tuple(sorted(more.items()))] = error
            return None

    @functools.wraps(function)
    def answer(*arguments: Arguments.args, **more: Arguments.kwargs) -> Result:
        result = tried(*arguments, **more)
        failure = failures.get((arguments, tuple(sorted(more.items()))))
        if failure is not None:
            raise failure
        return result  # type: ignore[return-value]  (None only where the function returned it)

    return answer
