"""The image, built for CPUs on a Debian of our own making: nothing is pulled from a registry of images.

Layers are kept in the user's cache, so that only what has changed is built again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.namespaces import why_not

ROOT = Path(__file__).parents[2]
NEEDS = ("buildah", "debootstrap", "unshare", "ssh-keygen")
BASE = "localhost/horovod_train-base:bookworm"
IMAGE = "localhost/horovod_train:test"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


class Builder:
    """Buildah, with a store of its own.

    Args:
        folder: Where the store is.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("tmp", "runroot"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "storage.conf").write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/store"\nrunroot = "{folder}/runroot"\n'
        )

    def call(self, *arguments: str, timeout_s: float = 60) -> str:
        """Return what a command of buildah prints."""
        done = subprocess.run(
            ["buildah", *arguments],
            env={
                **os.environ,
                "CONTAINERS_STORAGE_CONF": str(self.folder / "storage.conf"),
                "BUILDAH_ISOLATION": "chroot",
                "TMPDIR": str(self.folder / "tmp"),
            },
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout.strip()

    def build(self, *, torch: str = "", tag: str = IMAGE) -> None:
        """Build the image, with another PyTorch perhaps."""
        if BASE not in self.call("images", "--format", "{{.Name}}:{{.Tag}}").split():
            self._make_base()
        docker = ROOT / "docker"
        arguments = [f"--build-arg={name}={BASE}" for name in ("BUILD_BASE", "BASE")]
        arguments += [f"--build-arg=TORCH={torch}"] if torch else []
        self.call(
            *("bud", "--layers", "--network=host", f"--ignorefile={docker}/Dockerfile.dockerignore"),
            *(
                *arguments,
                *self._what_pip_needs(),
                f"--tag={tag}",
                f"--file={docker}/Dockerfile",
                str(ROOT),
            ),
            timeout_s=3000,
        )

    def inspect(self) -> dict[str, Any]:
        """What the image is made of."""
        found: dict[str, Any] = json.loads(self.call("inspect", "--type=image", IMAGE))
        return found

    def size(self, tag: str = IMAGE) -> str:
        """Size of the image, for people."""
        return self.call("images", "--format", "{{.Size}}", tag)

    @contextmanager
    def container(self, tag: str = IMAGE) -> Iterator[Container]:
        """Lend a container of an image."""
        name = self.call("from", tag)
        try:
            yield Container(self, name, Path(self.call("mount", name)))
        finally:
            self.call("rm", name)

    def _make_base(self) -> None:
        context = self.folder / "base"
        shutil.rmtree(context, ignore_errors=True)
        context.mkdir()
        subprocess.run(
            [
                "debootstrap",
                "--variant=minbase",
                "--include=ca-certificates",
                "bookworm",
                str(context / "root"),
            ],
            check=True,
            capture_output=True,
        )
        with tarfile.open(context / "base.tar", "w") as archive:
            archive.add(context / "root", ".")
        shutil.rmtree(context / "root")
        (context / "Dockerfile").write_text("FROM scratch\nADD base.tar /\n")
        self.call("bud", f"--tag={BASE}", str(context), timeout_s=600)
        shutil.rmtree(context)

    def _what_pip_needs(self) -> Iterator[str]:
        """Lend the build this machine's settings of pip, and the files that they name."""
        listed = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
        )
        settings = {}
        for line in listed.stdout.splitlines():
            name, _, value = line.partition("=")
            settings[name.removeprefix(":env:").removeprefix("global.")] = value.strip("'")
        config = self.folder / "pip.conf"
        config.write_text(
            "\n".join(["[global]", *(f"{name} = {value}" for name, value in settings.items()), ""])
        )
        words = " ".join(settings.values()).split()
        files = {Path(word.removeprefix("file://")) for word in words}
        files |= {path.parent for path in files if path.name == "simple"}
        for path in sorted({path for path in files if path.is_absolute() and path.exists()} | {CERTIFICATES}):
            yield f"--volume={path}:{path}:ro"
        yield f"--volume={config}:/etc/pip.conf:ro"


@dataclass(frozen=True)
class Container:
    """A container.

    Attributes:
        root: Its files, seen from here.
    """

    builder: Builder
    name: str
    root: Path

    def run(self, *command: str) -> str:
        """Return what a command prints in it, started as the image's user."""
        return self.builder.call("run", self.name, "--", *command, timeout_s=300)


def builder() -> Builder:
    """Return what builds the image; skips where that cannot be done."""
    if reason := why_not(*NEEDS):
        pytest.skip(reason)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Builder(cache / "horovod_train" / "image")


def files_of(root: Path, folders: Sequence[str] = (".",)) -> Iterator[Path]:
    """Yield the files below folders of an image."""
    for folder in folders:
        for path in (root / folder).rglob("*"):
            if path.is_file() and not path.is_symlink():
                yield path
