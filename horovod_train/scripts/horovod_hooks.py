"""Instrumentation of ``hvd.init()`` for scripts."""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

from horovod_train.scripts.meter import StepMeter


def watch_joining(meter: StepMeter) -> None:
    """Record in the meter when the script calls ``hvd.init()`` of any framework."""
    basics: Any = sys.modules["horovod.common.basics"].HorovodBasics
    plain_init = basics.init

    @wraps(plain_init)
    def init(*args: object, **kwargs: object) -> object:
        found = plain_init(*args, **kwargs)
        meter.has_joined = True
        return found

    basics.init = init
