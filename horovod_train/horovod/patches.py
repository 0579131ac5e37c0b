"""Patches of Horovod's source, and the source of the loopback library that is added to its wheel."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

from horovod_train.errors import EngineError
from horovod_train.system.optional import import_optional

PATCHES = Path(__file__).parent / "patches"
LOOPBACK = Path(__file__).parent / "loopback.cc"


def patch_files() -> list[Path]:
    """Return the patch files in the order of application."""
    return sorted(PATCHES.glob("*.patch"))


def patch_title(path: Path) -> str:
    """Return the first line of a patch, which describes its effect."""
    return path.read_text(encoding="utf-8").splitlines()[0]


def own_patches() -> dict[str, str]:
    """Return the checksums of the patches and of the loopback library's source, by file name."""
    return {path.name: sha256_of(path) for path in (*patch_files(), LOOPBACK)}


def apply_patches(source: Path, report: Callable[[str], None]) -> None:
    """Apply all patches to Horovod's source.

    Raises:
        EngineError: A patch cannot be applied.
        UserError: patch-ng is not installed.
    """
    patch_ng = import_optional("patch_ng", needed_by="engine build", hint="pip install patch-ng")
    logging.getLogger("patch_ng").setLevel(logging.ERROR)
    for path in patch_files():
        report(f"engine: patch {path.stem}: {patch_title(path)}")
        changes = patch_ng.fromfile(str(path))
        if not changes or not changes.apply(strip=1, root=str(source), fuzz=False):
            raise EngineError(f"the patch {path.name} does not fit the source of Horovod")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
