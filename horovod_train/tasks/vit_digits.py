"""Fine-tune a Vision Transformer from a local folder on scikit-learn's handwritten digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import ViTForImageClassification

from horovod_train.tasks.digits import digit_images

NUM_CLASSES = 10


class VitDigits:
    """1,797 images of 8 x 8 pixels, scaled to the model's image size; every fifth is an evaluation sample.

    Args:
        pretrained: Folder with ``config.json`` and ``model.safetensors``, from ``save_pretrained`` or a
            download such as google/vit-base-patch16-224. Its classifier is replaced by one for ten classes.

    Raises:
        FileNotFoundError: The folder contains no model.
    """

    def __init__(self, pretrained: str) -> None:
        self._folder = Path(pretrained).expanduser()
        if not (self._folder / "config.json").is_file():
            raise FileNotFoundError(
                f"{self._folder} holds no model: no config.json (set task_args.pretrained to the folder "
                "of one, such as a download of google/vit-base-patch16-224)"
            )

    def model(self) -> ViTForImageClassification:
        """Return the pretrained model with a new classifier, of shape [hidden, 10]."""
        return ViTForImageClassification.from_pretrained(
            self._folder, num_labels=NUM_CLASSES, ignore_mismatched_sizes=True, local_files_only=True
        )

    def train_data(self) -> _Images:
        """Return the 1,437 training samples."""
        return self._images(is_eval=False)

    def eval_data(self) -> _Images:
        """Return the 360 evaluation samples."""
        return self._images(is_eval=True)

    def metrics(self, found: Any) -> dict[str, float]:
        """Return the fraction of samples whose largest logit is that of their class."""
        return {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())}

    def _images(self, *, is_eval: bool) -> _Images:
        config = ViTForImageClassification.config_class.from_pretrained(self._folder)
        images, labels = digit_images()
        chosen = (np.arange(len(labels)) % 5 == 0) == is_eval
        pixels = torch.tensor(images[chosen], dtype=torch.float32) / 8 - 1  # -1 .. 1, as ViT expects
        return _Images(pixels, labels[chosen], config.image_size, config.num_channels)


class _Images:
    """Dataset of ``pixel_values``, shape [channels, size, size], and ``labels``."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, size: int, num_channels: int) -> None:
        self._pixels = images
        self._labels = labels
        self._size = size
        self._num_channels = num_channels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor | int]:
        image = self._pixels[index][None, None]
        scaled = functional.interpolate(image, size=self._size, mode="bilinear", align_corners=False)[0]
        return {
            "pixel_values": scaled.expand(self._num_channels, -1, -1),
            "labels": int(self._labels[index]),
        }
