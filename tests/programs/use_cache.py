"""Use files of a cache at random, and check each, until killed. usage: FOLDER SEED"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from horovod_train.data.cache import Cache, name_of

folder, seed = Path(sys.argv[1]), int(sys.argv[2])
cache = Cache(folder, max_bytes=3000)
chosen = random.Random(seed)
while True:
    number = chosen.randrange(12)
    content = bytes([number]) * (200 + 50 * number)

    def make(to: Path, content: bytes = content) -> None:
        with to.open("wb") as opened:
            for at in range(0, len(content), 100):
                opened.write(content[at : at + 100])
                opened.flush()

    file = cache.get(name_of(number), "x", len(content), make)
    if file.path.read_bytes() != content:
        (folder / "wrong").write_text(str(number))
    file.close()
