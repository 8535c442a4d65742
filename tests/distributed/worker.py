# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""One of several processes: runs jobs, one after the other, and writes what was recorded."""

import faulthandler
import pickle
import sys
import time
from pathlib import Path

import torch
from accelerate.state import AcceleratorState

from tests.distributed.processes import SILENCE
from tests.distributed.runs import recorded


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    records = {}
    for job in pickle.loads((folder / "jobs.pickle").read_bytes()):
        faulthandler.dump_traceback_later(SILENCE - 10)  # to show where it hangs
        start, busy = time.perf_counter(), time.process_time()
        AcceleratorState._reset_state()  # jobs are sharded in different ways
        records[job.name] = recorded(job, folder)
        spent = f"{time.perf_counter() - start:.1f} s, {time.process_time() - busy:.1f} s of them busy"
        print(f"{job.name}: {spent}", flush=True)  # noqa: T201
    rank = torch.distributed.get_rank()
    torch.save(records, folder / f"records-{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
