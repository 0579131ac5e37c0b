"""The functions that ``tests/corpus/mechanisms.py`` replaces exist under their names."""

from __future__ import annotations

from importlib import import_module
from operator import attrgetter

import pytest
from corpus.mechanisms import MECHANISMS

PLACES = sorted({each.place for each in MECHANISMS.values() if each.place})


@pytest.mark.parametrize("place", PLACES)
def test_a_replaced_function_exists(place):
    module, _, path = place.partition(":")

    assert callable(attrgetter(path)(import_module(module)))
