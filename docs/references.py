"""References that docs/generate.py writes from docstrings: the command line, and the Python interface."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click

import horovod_train
from horovod_train.cli.main import COMMANDS, cli

PACKAGE = Path(__file__).parents[1] / "horovod_train"

CLI = """# Commands

`horovod-train COMMAND --help` prints the same texts. `JOB` is the name of a task that ships with this package
or a file; `ID` is the ID of a job that `run` and `submit` print, or a unique prefix of it.

| command | purpose |
|---|---|
"""


def cli_reference() -> str:
    """Return the page of commands, with their arguments and options."""
    lines = [CLI + "\n".join(f"| [`{name}`](#{name}) | {text} |" for name, (_, text) in COMMANDS.items()), ""]
    context = click.Context(cli, info_name="horovod-train")
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        lines += _command(command, f"horovod-train {name}", name)
    return "\n".join(lines).rstrip() + "\n"


def _command(command: click.Command, path: str, title: str) -> Iterator[str]:
    with click.Context(command, info_name=path) as context:
        yield from (f"## {title}", "")
        usage = [piece for piece in command.collect_usage_pieces(context) if piece != "[OPTIONS]"]
        yield from (
            "```text",
            " ".join([path, *(["[OPTIONS]"] if _options(command) else []), *usage]),
            "```",
            "",
        )
        help_text = inspect.cleandoc(command.help or "").replace("``", "`").partition("\f")[0]
        yield from (help_text, "")
        if options := _options(command):
            yield from ("| option | meaning |", "|---|---|")
            for option in options:
                record = option.get_help_record(context)
                assert record is not None, f"{path} {option.name} has no help"
                names, text = (part.replace("|", "\\|") for part in record)
                yield f"| `{names}` | {' '.join(text.split())} |"
            yield ""
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                inner = command.get_command(context, name)
                assert inner is not None
                yield from _command(inner, f"{path} {name}", f"{title} {name}")


def _options(command: click.Command) -> list[click.Option]:
    return [each for each in command.params if isinstance(each, click.Option) and not each.hidden]


API = """# Python interface

What a program may import. Everything else may change without notice. Signatures omit the types of results
that the text states.

"""

SECTIONS = {  # title: introduction, and "file: names" of what is listed
    "Submit and follow jobs": (
        "`import horovod_train as ht`; [service.md](service.md) has examples.",
        "client: submit job jobs JobHandle JobResult",
        "launch/base: JobStatus",
        "plugins/serve/remote: Client",
        "errors: JobFailedError",
    ),
    "Your own training loop": (
        "`import horovod_train as ht`; [own-loop.md](own-loop.md) has examples.",
        "session: init Session",
        "own_loop: ShardedLoader Step SessionMetrics SessionCheckpoints SessionPreemption",
        "frameworks/torch/step/gathering: gather",
        "config/optimization: LearningRate",
    ),
    "Other frameworks' loops": (
        "[own-loop.md](own-loop.md) has examples. `init()` returns the communicator, with `rank` and `size`.",
        "plugins/tensorflow/framework: init broadcast DistributedGradientTape",
        "plugins/keras/optimizer: init distribute BroadcastState ExactMetrics ScaledLearningRate",
        "plugins/keras/data: ShardedDataset",
        "plugins/jax/framework: init broadcast average_over_ranks",
        "plugins/lightning/strategy: HorovodStrategy",
        "plugins/transformers/trainer: init HorovodTrainer",
        "plugins/mxnet/framework: init broadcast DistributedTrainer",
    ),
    "Tasks": (
        "A task is a class with the methods of one of these; optional methods are in the text.",
        "frameworks/torch/task: TorchTask",
        "plugins/tensorflow/framework: TensorflowTask",
        "plugins/keras/framework: KerasTask",
        "plugins/jax/framework: JaxTask",
        "plugins/lightning/framework: LightningTask",
        "plugins/transformers/framework: TransformersTask",
        "plugins/mxnet/framework: MxnetTask",
    ),
    "What another package may add": (
        (
            "Entry points lead to these; hooks have none, and are for changes of this package. "
            "[README.md](README.md) lists the groups; `tests/plugin` has examples, and the names that it "
            "imports are kept, too."
        ),
        "config/support: StrategySupport CodecSupport FrameworkSupport LauncherSupport TrackerSupport Axes",
        "config/support: BatchSystem",
        "frameworks/torch/strategies/base: Strategy",
        "frameworks/torch/codecs: Codec",
        "launch/base: Launcher",
        "launch/launchers/batch: BatchLauncher AllocationLauncher",
        "lr/schedules: Schedule",
        "telemetry/tracking: Tracker",
        "frameworks/base: Framework",
        "training/hooks/base: Hook",
    ),
}


def api_reference() -> str:
    """Return the page of the Python interface, from the source: no framework is imported."""
    lines = [API.rstrip(), ""]
    for title, (text, *entries) in SECTIONS.items():
        lines += [f"## {title}", "", text, ""]
        for entry in entries:
            file, names = entry.split(": ")
            for name in names.split():
                lines += _entry(file, name)
    return "\n".join(lines).rstrip() + "\n"


def _entry(file: str, name: str) -> Iterator[str]:
    module = f"horovod_train.{file.replace('/', '.')}"
    nodes = _nodes(file)
    node = nodes[name]
    yield from (f"### {name}", "", f"`from {_public(module, name)} import {name}`", "")
    if isinstance(node, ast.FunctionDef):
        yield from ("```python", _signature(node), "```", "")
        yield from _docstring(node)
        return
    yield from _docstring(node)
    for method in _methods(nodes, node):
        is_property = any(
            isinstance(each, ast.Name) and "property" in each.id for each in method.decorator_list
        )
        kind = method.name if is_property else _signature(method)
        first = (ast.get_docstring(method) or "").partition("\n\n")[0].replace("``", "`")
        yield f"- `{' '.join(kind.removeprefix('def ').split())}`: {' '.join(first.split())}"
    yield ""


def _public(module: str, name: str) -> str:
    """Return the package that exports a name of a module, or the module."""
    if horovod_train._EXPORTS.get(name) == module:  # noqa: SLF001
        return "horovod_train"
    package = module.rpartition(".")[0]
    exported = getattr(importlib.import_module(package), "__all__", ())
    return package if package != "horovod_train" and name in exported else module


def _nodes(file: str) -> dict[str, ast.FunctionDef | ast.ClassDef]:
    """Return the functions and classes of a file, and the classes that it imports from this package."""
    tree = ast.parse((PACKAGE / f"{file}.py").read_text(encoding="utf-8"))
    found: dict[str, ast.FunctionDef | ast.ClassDef] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
    bases = {base.id for node in found.values() if isinstance(node, ast.ClassDef) for base in node.bases
             if isinstance(base, ast.Name)}  # fmt: skip
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("horovod_train."):
            for alias in node.names:
                if alias.name in bases and alias.name not in found:
                    inner = str(node.module).removeprefix("horovod_train.").replace(".", "/")
                    found.update({n: each for n, each in _nodes(inner).items() if n not in found})
    return found


def _methods(
    nodes: dict[str, ast.FunctionDef | ast.ClassDef], node: ast.ClassDef
) -> Iterator[ast.FunctionDef]:
    """Yield the public methods of a class that have a docstring, its own before those of its bases."""
    seen: set[str] = set()
    todo = [node]
    while todo:
        each = todo.pop(0)
        for method in each.body:
            if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                if method.name not in seen and ast.get_docstring(method):
                    yield method
                seen.add(method.name)
        for base in each.bases:
            found = nodes.get(base.id) if isinstance(base, ast.Name) else None
            if isinstance(found, ast.ClassDef):
                todo.append(found)


def _signature(node: ast.FunctionDef) -> str:
    arguments = ast.unparse(node.args)
    arguments = re.sub(r"^(self|cls)(, )?", "", arguments)
    result = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    text = f"{node.name}({arguments}){result}"
    return text if len(text) < 100 else re.sub(r", (?=\*?\*?\w+[:,]|\*,)", ",\n    ", text)


def _docstring(node: ast.FunctionDef | ast.ClassDef) -> Iterator[str]:
    """Yield a docstring as Markdown: Google's sections become lists."""
    text = (ast.get_docstring(node) or "").replace("``", "`")
    for part in re.split(r"\n\n", text):
        head, _, rest = part.partition("\n")
        if head in ("Args:", "Attributes:", "Raises:", "Returns:", "Yields:"):
            yield from (f"{head}", "")
            for item in re.split(r"\n(?=    \S)", "\n" + rest)[1:]:
                name, colon, meaning = " ".join(item.split()).partition(": ")
                yield f"- `{name}`: {meaning}" if colon else f"- {name}"
        elif part.startswith((".. code-block", "    ")):
            yield from ("```text", inspect.cleandoc(part.removeprefix(".. code-block:: text")), "```")
        else:
            yield part
        yield ""
