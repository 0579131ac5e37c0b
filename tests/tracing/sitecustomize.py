"""Records who called the functions that a path goes through: see ``tests/support/paths.py``.

Python imports this file by its name when its folder is on the PYTHONPATH. Each process appends lines to a
file of its own: a station, and the functions of the package on the stack, the outermost first.

Functions are wrapped when their module has been imported. A profiler would miss signal handlers: Python calls
no profiler for a handler that runs while the profiler does.
"""

import functools
import importlib.machinery
import json
import os
import sys
from pathlib import Path

PACKAGE = f"{os.sep}horovod_train{os.sep}"


class Recorder(importlib.machinery.PathFinder):
    """Finds modules as Python does, and wraps the stations in those that have some."""

    folder = Path()
    stations: dict[str, list[str]] = {}
    seen: set[tuple[str, ...]] = set()

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        spec = super().find_spec(fullname, path, target)
        if spec is not None and spec.origin and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            files = [file for file in cls.stations if spec.origin.endswith(f"{os.sep}{file}")]
            names = [name for file in files for name in cls.stations[file]]
            if names:
                spec.loader = Loader(fullname, spec.origin)
                spec.loader.names = names
        return spec

    @classmethod
    def record(cls, station: str, function) -> None:
        """Append the stack of a call of a station, once for each stack."""
        codes = [function.__code__]
        frame = sys._getframe(2)  # the caller of the wrapper
        while frame is not None:
            codes.append(frame.f_code)
            frame = frame.f_back
        ours = [code for code in reversed(codes) if PACKAGE in code.co_filename]
        stack = [f"{code.co_filename.rpartition(PACKAGE)[2]}:{code.co_qualname}" for code in ours]
        line = (station, *stack)
        if line not in cls.seen:
            cls.seen.add(line)
            name = f"{os.uname().nodename}-{os.getpid()}.jsonl"
            with (cls.folder / name).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


class Loader(importlib.machinery.SourceFileLoader):
    """Wraps functions of a module as soon as it has been executed, before anybody gets them by name."""

    names: list[str]
    is_imported = False

    def exec_module(self, module):
        self.is_imported = True
        super().exec_module(module)
        wrap_all(module, self.names)

    def get_code(self, fullname):
        """Return the code of the module; one that runs as a program wraps its functions before it begins."""
        if self.is_imported:
            return super().get_code(fullname)
        definitions, guard, program = self.get_source(fullname).rpartition('if __name__ == "__main__":')
        call = f"import sitecustomize, sys\nsitecustomize.wrap_all(sys.modules['__main__'], {self.names!r})\n"
        return compile(definitions + call + guard + program, self.path, "exec")


def wrap_all(module, stations):
    """Wrap those stations that the module has; other packages have files of the same name."""
    for station in stations:
        *parents, name = station.partition(":")[2].split(".")
        parent = functools.reduce(lambda owner, each: getattr(owner, each, None), parents, module)
        if function := getattr(parent, name, None):
            setattr(parent, name, wrapped(station, function))


def wrapped(station: str, function):
    @functools.wraps(function)
    def recorded(*arguments, **settings):
        Recorder.record(station, innermost)
        return function(*arguments, **settings)

    innermost = function
    while hasattr(innermost, "__wrapped__"):
        innermost = innermost.__wrapped__
    return recorded


if "TRACED_INTO" in os.environ:
    Recorder.folder = Path(os.environ["TRACED_INTO"])
    for each in json.loads((Recorder.folder / "stations.json").read_text(encoding="utf-8")):
        Recorder.stations.setdefault(each.partition(":")[0], []).append(each)
    sys.meta_path.insert(0, Recorder)
