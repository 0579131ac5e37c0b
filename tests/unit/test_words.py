"""Names and texts use the terms of MPI, Horovod, PyTorch, Kubernetes and Prometheus.

The lists contain words that used to replace terms of the field, and phrases without a noun. They are limits,
not a spell checker: a text without hits may still be hard to read.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "horovod_train").rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])

# In identifiers.
BANNED_WORDS = {
    *("told", "tell", "tells", "say", "says", "said", "hear", "hears", "heard"),
    *("ask", "asks", "asked", "held", "here", "there", "beside", "away", "lose"),
    *("wishes", "lately", "brief", "remembered", "soon", "twice", "outstanding", "aside", "whoever"),
    *("odd", "nobody", "somebody", "speaker", "alongside", "anew", "late", "monstrous", "goes"),
    *("stays", "waits", "came"),
}

# In texts: phrases without a noun of the field.
BANNED_PHRASES = re.compile(
    r"\b(?:whoever|nobody|somebody|anybody|as ever|went on|is told|are told|was told|be told|is asked|"
    r"are asked|heard of|hears of|stays away|stay away|stayed away|what is here|in good order|cannot be had|"
    r"anew|beside|set aside|put aside|such a one|once more|goes on|go on from|at hand|take up|takes up|"
    r"taken up)\b",
    re.IGNORECASE,
)

# Fields of events, which other programs read.
PUBLIC_NAMES = {"waited_for_s"}
MAX_PHRASES_IN_SOURCES = 40
MAX_PHRASES_IN_PAGES = 40


def bound_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the names that a module defines, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def words_of(name: str) -> set[str]:
    """Return the words of an identifier.

    >>> sorted(words_of("_LateOutcome"))
    ['late', 'outcome']
    """
    return set(re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().strip("_").split("_"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "horovod_train")))
def test_names_use_terms_of_the_field(path):
    found = {
        f"{path.name}:{line}: {name}"
        for name, line in bound_names(ast.parse(path.read_text()))
        if name not in PUBLIC_NAMES
        if words_of(name) & BANNED_WORDS
    }

    assert not found


def texts_of(path: Path) -> str:
    """Return comments and strings of a module, or a page without its code blocks."""
    text = path.read_text()
    if path.suffix == ".md":
        return re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return "\n".join(token.string for token in tokens if token.type in (tokenize.COMMENT, tokenize.STRING))


@pytest.mark.parametrize(
    ("paths", "limit"),
    [
        pytest.param(SOURCES, MAX_PHRASES_IN_SOURCES, id="sources"),
        pytest.param(PAGES, MAX_PHRASES_IN_PAGES, id="pages"),
    ],
)
def test_texts_name_their_subjects(paths, limit):
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in paths
        for match in BANNED_PHRASES.finditer(texts_of(path))
    ]

    assert len(found) <= limit, "\n".join(found)
