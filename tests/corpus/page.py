"""docs/models.md: which models of the corpus each strategy trains, and which it refuses, with the reasons.

usage: page.py FILE RESULTS ... [--others COLUMN=RESULTS ...]
RESULTS are files that run.py, and others.py, have written with --out.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent.parent)]

from corpus.base import Case

Results = Mapping[str, Mapping[str, Any]]
EQUAL, NOT_TRIED = "yes", ""
ALL, SEPARATOR = "**Trained under all of ", " · "
HEAD = """# Models and strategies

Models and training loops of `tests/corpus` are small; each is written to be difficult for one of the
mechanisms by which strategies work. **yes**: ranks end with the weights and buffers of a plain loop over the
joint batch in one process, with SGD, and with AdamW, accumulation and clipping. A number: the job ends with
exit code 2, in one of these settings at least, for the reason below. Empty: not run. No other result occurs:
no model ends with other weights, and none hangs. Campaign tests train all models on two and on three ranks,
`make test` every thirtieth pair.

Your own models are compared in the same way: the plain model runs the first steps under a strategy
as well (`health.verify_strategy`), and a difference ends the job.

"""


def title(case: type[Case]) -> str:
    """Return the name of a row: the class in words, and its docstring."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=A)(?=[A-Z][a-z])", " ", case.__name__)
    text = (case.__dict__.get("__doc__") or "").strip().splitlines()
    return f"{words}: {text[0].rstrip('.')}" if text else words


def reason(output: str) -> str:
    """Return why a job was refused, without the names and numbers of its model.

    >>> reason("error: rank 0 on node1: strategy fsdp cannot train this model: RuntimeError: a view of 3")
    'the strategy cannot train this model'
    """
    lines = [line for line in output.splitlines() if "error: " in line and "another rank exited" not in line]
    text = lines[0].partition("error: ")[2] if lines else "no message"
    text = re.sub(r"^rank \d+ on \S+: ", "", text)
    text = re.sub(r"^strategy (\w+): ", "", text)
    text = re.sub(
        r"strategy (allreduce|zero|ddp|fsdp|deepspeed|pipeline|tensor_parallel)\b", "the strategy", text
    )
    text = re.sub(r" \(.*", "", text)
    text = re.sub(r"^'[^']+' ", "a parameter ", text)
    text = re.sub(r"(attribute|buffer|name|parameter|weight) '[^']+'", r"\1", text)
    text = re.sub(r"optimizer [A-Z]\w+", "optimizer", text)
    text = re.sub(r"^\w+ cannot be cut", "the model cannot be cut", text)
    text = re.sub(r"^rank \d", "a rank", text)
    first, *others = text.split(": ")
    return f"{first}: {others[0]}" if others and first.endswith("into stages") else first


OTHERS_TITLE = "## Keras, TensorFlow and JAX"
OTHERS_HEAD = f"""
{OTHERS_TITLE}

Models of `tests/corpus/keras_nets.py` and `jax_nets.py`, on two and three ranks, each compared with a plain
loop of its framework over the joint batch in one process.

"""


def others_page(of_columns: Mapping[str, Results]) -> str:
    """Return the part of the page on other frameworks.

    Args:
        of_columns: What was seen, by framework and back end.
    """
    keys = {column: {key.split()[0] for key in results} for column, results in of_columns.items()}
    names = dict.fromkeys(key.split()[0] for results in of_columns.values() for key in results)
    rows = []
    for name in names:
        cells = []
        for column, results in of_columns.items():
            seen = {found["what"] for key, found in results.items() if key.split()[0] == name}
            bad = sorted(seen - {"equal"})
            cells.append(NOT_TRIED if name not in keys[column] else f"**{bad[0]}**" if bad else EQUAL)
        rows.append(f"| {name} | {' | '.join(cells)} |")
    lines = [f"| model | {' | '.join(of_columns)} |", f"|---|{'---|' * len(of_columns)}", *rows]
    return OTHERS_HEAD + "\n".join(lines) + "\n"


def page(
    results: Results,
    cases: Mapping[str, type[Case]],
    strategies: Iterable[str],
    others: Mapping[str, Results],
) -> str:
    """Return the page, as Markdown."""
    strategies = list(strategies)
    numbers: dict[str, int] = {}
    rows, of_all = [], {}
    for name, case in cases.items():
        cells = []
        for strategy in strategies:
            seen = [found for key, found in results.items() if key.split()[:2] == [name, strategy]]
            reasons = [reason(found["output"]) for found in seen if found["what"] == "refused"]
            bad = sorted({found["what"] for found in seen} - {"equal", "refused"})
            cell = EQUAL if seen else NOT_TRIED
            if reasons:
                cell = str(numbers.setdefault(reasons[0], len(numbers) + 1))
            cells.append(f"**{bad[0]}**" if bad else cell)
        if set(cells) <= {EQUAL, NOT_TRIED}:
            tried = ", ".join(s for s, cell in zip(strategies, cells, strict=True) if cell == EQUAL)
            of_all.setdefault(tried, []).append(title(case))
        else:
            rows.append(f"| {title(case)} | {' | '.join(cells)} |")
    lines = [
        *(f"{ALL}{tried}**: {SEPARATOR.join(titles)}.\n" for tried, titles in of_all.items()),
        f"| model | {' | '.join(f'`{each}`' for each in strategies)} |",
        f"|---|{'---|' * len(strategies)}",
        *rows,
        "",
        "## Reasons",
        "",
        *(f"{number}. {text}" for text, number in numbers.items()),
    ]
    return HEAD + "\n".join(lines) + "\n" + (others_page(others) if others else "")


def trained_by(text: str, cases: Mapping[str, type[Case]], strategies: Iterable[str]) -> set[tuple[str, str]]:
    """Return the pairs of a case and a strategy that a page says are trained."""
    strategies = list(strategies)
    names = {title(case): name for name, case in cases.items()}
    found = set()
    for line in text.splitlines():
        if line.startswith(ALL):
            tried, _, titles = line.removeprefix(ALL).removesuffix(".").partition("**: ")
            found |= {
                (names[label], strategy)
                for label in titles.split(SEPARATOR)
                if label in names
                for strategy in tried.split(", ")
            }
            continue
        label, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        found |= {
            (names[label], strategy)
            for strategy, cell in zip(strategies, cells, strict=False)
            if label in names and cell == EQUAL
        }
    return found


def main() -> None:
    from corpus.run import COLUMNS, cases

    parser = argparse.ArgumentParser()
    parser.add_argument("page", type=Path)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--others", nargs="*", default=[])
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for file in options.results:
        results |= json.loads(file.read_text())
    named = (each.split("=") for each in options.others)
    others = {column: json.loads(Path(file).read_text()) for column, file in named}
    options.page.write_text(page(results, cases(), COLUMNS, others))


if __name__ == "__main__":
    main()
