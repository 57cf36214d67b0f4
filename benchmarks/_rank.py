"""What every program of the benchmarks that runs once per rank does around its measurement."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist


def measure_on_this_rank(measure: Callable[[dict[str, Any]], Any]) -> None:
    """Call ``measure`` with the JSON object that is this program's argument; rank 0 writes what it returns as one line.

    Standard output is kept for that: DeepSpeed and the compilers that it starts write there too.  Does not return.
    """
    with os.fdopen(os.dup(1), "w") as result:
        os.dup2(2, 1)
        # The lab's links carry gloo; on a machine with GPUs DeepSpeed would choose them by itself.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        # Before all other programs, and with all threads, which inherit it: half a core that something else takes is a quarter
        # of the compute.  Without root there is no lab, and no priority.
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, -20)
        dist.init_process_group("gloo")
        measured = measure(json.loads(sys.argv[1]))
        if dist.get_rank() == 0:
            print(json.dumps(measured), file=result, flush=True)
        dist.barrier()
    # Not through the interpreter's own end: gloo's threads may still hold tensors then, and abort the process at times.
    sys.stderr.flush()
    os._exit(0)
