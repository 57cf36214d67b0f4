"""Run a script that is not to be touched, with the ``osdp`` section of its DeepSpeed JSON applied.

deepspeed --module ds_osdp.run train.py ARGS...
torchrun --nproc_per_node 8 --module ds_osdp.run train.py ARGS...
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

__all__ = ["main"]

_RUNNER_OPTION = "--local_rank"


def main(argv: list[str]) -> None:
    """Run the script named in ``argv`` as ``__main__``, with the arguments after it.

    Raises:
        SystemExit: no script is named, or there is no such file.
    """
    # DeepSpeed's launcher puts --local_rank=N before everything; the script expects it among its own arguments.
    leading = [a for a in argv[:1] if a.startswith(f"{_RUNNER_OPTION}=")]
    rest = argv[len(leading) :]
    if not rest or rest[0].startswith("-"):
        raise SystemExit("usage: deepspeed --module ds_osdp.run SCRIPT [ARGUMENTS...]")
    script = Path(rest[0])
    if not script.is_file():
        raise SystemExit(f"ds_osdp.run: there is no file {rest[0]!r}")
    import ds_osdp

    sys.argv = [str(script), *leading, *rest[1:]]
    sys.path.insert(0, str(script.resolve().parent))
    with ds_osdp.enable():
        runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
