"""What a run measured, as DeepSpeed's CSV monitor wrote it."""

from __future__ import annotations

import csv
import statistics
from dataclasses import dataclass
from pathlib import Path

from ds_osdp.errors import DocumentError

__all__ = ["Measured", "read_measured"]

WARM_UP_STEPS = 3
"""DeepSpeed learns the order of modules in the first, and prefetches from the third."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The ``osdp/`` metrics of a run."""

    step_seconds: dict[int, float]
    """By optimizer step."""
    peak_bytes: int | None
    """Of the rank that wrote them; None where the device does not count it."""

    @property
    def median_seconds(self) -> float:
        """Without the steps in which DeepSpeed warms up, if there are others."""
        seconds = list(self.step_seconds.values())
        return statistics.median(seconds[WARM_UP_STEPS:] or seconds)


def read_measured(folder: Path) -> Measured:
    """The metrics in ``folder``: ``csv_monitor.output_path/job_name`` of the DeepSpeed JSON.

    Raises:
        DocumentError: there are none, or a file is damaged.
    """
    seconds = _column(folder / "osdp_step_seconds.csv")
    if not seconds:
        raise DocumentError(
            f"{folder} holds no osdp_step_seconds.csv: run with DeepSpeed's csv_monitor enabled, and give the folder "
            "csv_monitor.output_path/job_name"
        )
    peaks = _column(folder / "osdp_peak_bytes.csv")
    return Measured(seconds, int(max(peaks.values())) if peaks else None)


def _column(path: Path) -> dict[int, float]:
    """Values by step; a step that a resumed run took again counts as it was taken last."""
    try:
        with path.open(newline="") as file:
            return {int(step): float(value) for step, value in csv.reader(file) if step != "step"}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DocumentError(f"cannot read {path}: {error}") from error
