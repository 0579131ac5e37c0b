"""Files of a task that are uploaded with a job.

They are stored below ``run_dir/<name>``, in a folder whose name is a hash of their names and contents. They
are text; nothing in them is executed by the server.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path, PurePosixPath

from horovod_train.client.local import described
from horovod_train.config.schema import Job
from horovod_train.errors import UserError
from horovod_train.system.files import make_folder

MAX_FILES_BYTES = 8 * 1024 * 1024
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
HASH_CHARS = 16


def job_with_files(
    job: Mapping[str, object], overrides: Mapping[str, object], files: Mapping[str, str]
) -> Job:
    """Store files below ``run_dir/<name>``, and return the job, whose task may be one of them.

    Args:
        job: Job description; relative paths of tasks refer to the files.
        overrides: Values by dotted path; they override the job.
        files: Contents by relative path.

    Raises:
        ConfigError: The job description is not valid; the error lists all problems.
        UserError: The files are too large, or the name of one is not a relative path.
    """
    if not files:
        return described(job, overrides)
    _check(files)
    with tempfile.TemporaryDirectory(prefix="horovod_train-") as temporary:
        _write(Path(temporary), files)
        checked = described(job, overrides, Path(temporary))
        digest = sha256(json.dumps(dict(sorted(files.items()))).encode()).hexdigest()[:HASH_CHARS]
        folder = Path(checked.run_dir).expanduser().resolve() / checked.name / f"code-{digest}"
        if not folder.exists():
            make_folder(folder.parent, checked.run_dir_access)
            _place(files, folder)
        if any(_text_in(folder / name) != text for name, text in files.items()):
            raise UserError(
                f"files: {folder} contains other files than were uploaded", hint="delete this folder"
            )
    return described(job, overrides, folder)


def _text_in(path: Path) -> str | None:
    try:
        return path.read_bytes().decode()
    except (OSError, ValueError):
        return None


def _check(files: Mapping[str, str]) -> None:
    for name in files:
        parts = PurePosixPath(name).parts
        if "/".join(parts) != name or not all(_PART.fullmatch(part) for part in parts):
            raise UserError(
                f"files: {name!r} must be a relative path whose parts contain only letters, digits, '.', '_' "
                "and '-', and start with a letter, a digit or '_'",
                hint="such as `train.py` or `models/net.py`",
            )
    size_bytes = sum(len(text.encode(errors="replace")) for text in files.values())
    if size_bytes > MAX_FILES_BYTES:
        raise UserError(
            f"files: the total size is {size_bytes} bytes; the limit is {MAX_FILES_BYTES}",
            hint="put data where the ranks can read it, and upload code only",
        )


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())  # without a translation of line ends
        except (OSError, ValueError) as error:  # `a` and `a/b`, or a lone surrogate
            raise UserError(f"files: {name} cannot be written: {error}") from error


def _place(files: Mapping[str, str], folder: Path) -> None:
    """Create a folder with its files atomically, because the server may be killed at any time."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write(temporary, files)
        temporary.chmod(0o755)
        with suppress(OSError):  # another request has created it
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
