"""What a training test varies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BUCKET_BYTES = 100_000
"""Of the plans made by hand: less than the gradients of the model, so that there are several buckets."""


@dataclass
class Case:
    """One way of training; the plan is added to it."""

    name: str
    steps: int = 10
    accumulation: int = 1
    bf16: bool = False
    build: str = "gpt"
    model: dict[str, Any] = field(default_factory=dict)
    lion: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    frozen: str = ""
    zero_init: bool = False
    seed_by_rank: bool = False
    groups: bool = False
    drive: str = "micro_steps"
