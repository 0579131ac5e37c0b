"""Background work for the duration of a block of code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread


@contextmanager
def background_thread(work: Callable[[Event], None]) -> Iterator[None]:
    """Do work in a thread while the block runs.

    Args:
        work: Gets what is set when the block is over, and returns soon after that.
    """
    over = Event()
    thread = Thread(target=work, args=(over,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
