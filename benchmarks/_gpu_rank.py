"""One of two ranks that share the machine's only device: `_worker.py` there."""

import os

from _rank import measure_on_this_rank
from _worker import run

if __name__ == "__main__":
    os.environ["LOCAL_RANK"] = "0"
    measure_on_this_rank(run)
