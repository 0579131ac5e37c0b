"""Images: each file is a sample, and the name of its folder is its class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from horovod_train.data.source import DataError, Opened, Rows, Source
from horovod_train.errors import UserError
from horovod_train.system.machine import import_optional

IMAGES = frozenset({"jpg", "jpeg", "png", "bmp", "gif", "ppm", "pgm", "pbm", "tif", "tiff", "webp"})


def image_array(data: bytes) -> Any:
    """Return the pixels of an image in RGB, uint8, shape [height, width, 3].

    Raises:
        DataError: The bytes are not an image.
    """
    pillow = import_optional("PIL.Image", needed_by="images", hint="pip install pillow")
    try:
        with pillow.open(BytesIO(data)) as image:
            if image.mode.startswith(("I", "F")):
                raise DataError(
                    f"has pixels of mode {image.mode}, which RGB cannot represent: set data.decode"
                )
            return np.array(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"is not an image that Pillow can read: {error}") from error


def is_image(data: bytes | None) -> bool:
    """Return whether bytes begin as those of an image."""
    return data is not None and data.startswith(SIGNATURES)


SIGNATURES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM", b"RIFF", b"II*\0", b"MM\0*")


class _Image:
    def __init__(self, file: Path, class_name: str) -> None:
        self._file, self._class_name = file, class_name

    def read(self, places: Sequence[int]) -> list[Any]:
        """Return the only sample."""
        return [{"image": self._file.read_bytes(), "class": self._class_name} for _ in places]

    def close(self) -> None:
        """Do nothing: the file is open only while it is read."""


class ImageFolder(Source):
    """Images in a folder for each class. A stored sample has the bytes of an image, and its class.

    It is decoded to the pixels, uint8 of shape [height, width, 3], and the number of the class.
    """

    is_one_sample: ClassVar[bool] = True

    classes: list[str] = []
    """Names of the classes, whose places are their numbers; empty: those of the training data, sorted."""

    def rows(self, file: Path) -> Rows:
        """Return a row without numbers."""
        return np.zeros((1, 0), np.int64)

    def open(self, file: Path, rows: Rows, url: str) -> Opened:
        """Open an image."""
        return _Image(file, class_of(url))

    def described(self, files: Sequence[str]) -> Mapping[str, Any]:
        """Return the classes."""
        return {} if self.classes else {"classes": sorted({class_of(file) for file in files})}

    def decode(self, sample: Any) -> tuple[Any, int]:
        """Return pixels and number of the class."""
        if sample["class"] not in self.classes:
            raise UserError(
                f"the class {sample['class']!r} is none of those of the training data",
                hint="set data.source_args.classes to the names of all classes, which are folders of images: "
                "files: train/*/*",
            )
        return image_array(sample["image"]), self.classes.index(sample["class"])


def class_of(file: str) -> str:
    """Return the name of the folder of a path or URL."""
    return file.rpartition("/")[0].rpartition("/")[2]
