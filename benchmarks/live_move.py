"""A live engine that moved to a plan beside one that was started under it: seconds per step, and of the move.

    python benchmarks/live_move.py --json [--ranks 2 --turns 6 --steps 4]

Both engines train in one process in alternating blocks (A B, B A, ...), on the loopback device, fp32, all units at stage 0;
the first was at stage 3, moved there, back, and there again.  The ratio is of the medians over blocks of each block's median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from _lab import environment
from netlab import RanksFailedError, exit_on_signals, run_ranks

WORKER = Path(__file__).with_name("_move_worker.py")
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": 10**9,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """What rank 0 measured, and the ratio it was measured for."""
    model = {"layers": 6, "hidden": 512, "heads": 8, "vocab": 256, "tokens": 128}
    request = {"model": model, "config": CONFIG, "steps": arguments.steps, "turns": arguments.turns}
    with tempfile.TemporaryFile() as output:
        command = [sys.executable, str(WORKER), json.dumps(request)]
        run_ranks(command, world=arguments.ranks, lab=None, stdout=output, timeout_seconds=arguments.timeout_seconds)
        output.seek(0)
        found = json.loads(output.read())
    seconds = {
        name: statistics.median(statistics.median(block) for block in blocks) for name, blocks in found["step_seconds"].items()
    }
    to_whole, to_sharded, to_whole_again = found["move_seconds"]
    return {
        "moved_over_started": seconds["moved"] / seconds["started"],
        "move_seconds": {"3 to 0": to_whole, "0 to 3": to_sharded, "3 to 0 again": to_whole_again},
        "state_bytes_per_rank": found["state_bytes"],
        "seconds": seconds,
        "environment": environment(),
        "settings": {**vars(arguments), "model": model, "config": CONFIG},
        "step_seconds": found["step_seconds"],
    }


def main() -> int:
    """Run the command line: 0 when measured, 1 when the run failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a short table")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=6, help="blocks of each engine")
    parser.add_argument("--steps", type=int, default=4, help="steps of a block")
    parser.add_argument("--timeout-seconds", type=float, default=460.0)
    arguments = parser.parse_args()
    exit_on_signals()
    try:
        result = measure(arguments)
    except RanksFailedError as error:
        print(f"live_move: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(result))
    else:
        print(f"step, moved over started: {result['moved_over_started']:.3f}")
        for move, seconds in result["move_seconds"].items():
            print(f"move from stage {move}: {seconds:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
