"""Many ranks that only serve metrics, played by one process: each has an address of its own on loopback.

usage: NUM_RANKS TARGETS_FILE
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from prometheus_client import generate_latest

from benchmarks.run import PORT
from horovod_train.collectives.base import SingleRank
from horovod_train.telemetry.catalog import StepRecord, WaitRecord
from horovod_train.telemetry.recorder import Recorder

STEP_S = 0.1
PLACE = "@RANK@"


def template() -> tuple[str, str]:
    """Return what a rank says, whole and as the page asks it, with a place for its number."""
    recorder = Recorder("many", "r1", SingleRank(0, 1000, 0, "n" + PLACE), 1000)
    phases = {"data": 0.02, "forward": 0.03, "backward": 0.03, "allreduce_wait": 0.01, "optimizer": 0.01}
    step = StepRecord(STEP_S, phases, 32, 1.0, 0.5, 0.5, 0.1, is_finite=True, own_seconds=0.09)
    recorder.record(step)
    recorder.record(WaitRecord(0.005, 0.005, 0.1))
    whole = generate_latest(recorder.registry).decode().replace('rank="0"', f'rank="{PLACE}"')
    short = "\n".join(line for line in whole.splitlines() if "_bucket" not in line and "_created" not in line)
    return whole, short + "\n"


def grown(text: str, steps: float, rank: int) -> bytes:
    """Return an answer after so many steps: counters and sums grow with them."""
    lines = []
    slow = 2.0 if rank % 250 == 7 else 1.0
    for line in text.splitlines():
        if line.startswith("#") or not ("_total{" in line or "_sum{" in line or "_count{" in line):
            lines.append(line)
            continue
        name, _, number = line.rpartition(" ")
        factor = slow if "own_seconds" in name or 'phase="data"' in name else 1.0
        lines.append(f"{name} {float(number) * steps * factor}")
    return "\n".join(lines).replace(PLACE, str(rank)).encode() + b"\n"


async def main(num_ranks: int, targets: Path) -> None:
    """Serve until the process is ended."""
    whole, short = template()
    addresses = {f"127.0.{rank // 250 + 1}.{rank % 250 + 1}": rank for rank in range(num_ranks)}
    begun_s = time.monotonic()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:  # whoever asked has gone
            writer.close()
            return
        rank = addresses[writer.get_extra_info("sockname")[0]]
        body = grown(short if b"name%5B%5D" in head else whole, (time.monotonic() - begun_s) / STEP_S, rank)
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nConnection: close\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "0.0.0.0", PORT + 70)  # noqa: S104  (all of loopback)
    groups = [
        {
            "targets": [f"{address}:{PORT + 70}"],
            "labels": {"training_job": "many", "run": "r1", "rank": str(rank), "host": f"n{rank // 8}"},
        }
        for address, rank in addresses.items()
    ]
    targets.write_text(json.dumps(groups))  # noqa: ASYNC240  (before anybody is served)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2])))
