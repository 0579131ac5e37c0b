"""Text charts of a schedule, for the terminal."""

from __future__ import annotations

from collections.abc import Callable

BLOCKS = " ▁▂▃▄▅▆▇█"
WIDTH = 60
HEIGHT = 6


def chart(
    curve: Callable[[float], float], total_epochs: float, *, height: int = HEIGHT, end: str = ""
) -> list[str]:
    """Return a chart of a curve over the epochs of a training, as lines; the vertical axis begins at 0.

    Args:
        curve: Returns the value after a number of epochs.
        total_epochs: Length of the training.
        height: Number of lines, without that of the axis.
        end: Label of the end of the axis; empty: the length in epochs.

    >>> for line in chart(lambda epochs: epochs, 10, height=2): print(line.rstrip())
                9.917 |                                ▁▁▁▂▂▂▂▃▃▃▃▄▄▄▅▅▅▅▆▆▆▆▇▇▇▇██
                    0 |  ▁▁▁▁▂▂▂▃▃▃▃▄▄▄▄▅▅▅▆▆▆▆▇▇▇▇████████████████████████████████
                      0                                                  10 epochs
    """
    values = [curve(total_epochs * (column + 0.5) / WIDTH) for column in range(WIDTH)]
    top = max(values) or 1.0
    lines = []
    for row in reversed(range(height)):
        filled = [min(max(value / top * height - row, 0.0), 1.0) for value in values]
        label = f"{top:.4g}" if row == height - 1 else "0" if row == 0 else ""
        lines.append(f"{label:>17} |" + "".join(BLOCKS[round(8 * part)] for part in filled))
    end = end or f"{total_epochs:g} epochs"
    return [*lines, " " * 18 + "0" + f"{end:>{WIDTH - 1}}"]
