"""Run a job's worker in this process. usage: JOB_FILE"""

from __future__ import annotations

import sys
from pathlib import Path

from horovod_train.worker import WorkerOptions, main

sys.exit(main(WorkerOptions(Path(sys.argv[1]), run_id="in-a-pool")))
