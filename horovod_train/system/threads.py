"""Background threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread


@contextmanager
def background_thread(work: Callable[[Event], None]) -> Iterator[None]:
    """Run ``work`` in a thread during the block. It must return soon after its argument, an event, is set."""
    over = Event()
    thread = Thread(target=work, args=(over,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
