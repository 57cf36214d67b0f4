"""A DeepSpeed that does not fit is refused before anything is patched.  In processes of their own: they import DeepSpeed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

BEFORE = """
import deepspeed
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3
from deepspeed.runtime.zero.partition_parameters import Init
from ds_osdp import deepspeed_seams as seams
stock = deepspeed.initialize, DeepSpeedEngine._configure_zero_optimizer
"""
AFTER = """
import ds_osdp
try:
    ds_osdp.enable()
except ds_osdp.OsdpError as error:
    print(type(error).__name__, error)
print("untouched", (deepspeed.initialize, DeepSpeedEngine._configure_zero_optimizer) == stock, seams.installed())
"""


def run(change: str) -> str:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", BEFORE + change + AFTER]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("del Stage3.get_grad_norm_direct", "DeepSpeedZeroOptimizer_Stage3.get_grad_norm_direct is missing"),
        ("Stage3.partition_grads = lambda self, other: None", "partition_grads takes (other)"),
        ("Init._convert_to_deepspeed_param = lambda self, param: None", "ds_zero_partition_process_group"),
    ],
)
def test_a_seam_that_moved_is_named_and_nothing_is_patched(change: str, message: str) -> None:
    output = run(change)
    assert "SeamError" in output
    assert message in output
    assert "deepspeed>=0.19.3,<0.20" in output
    assert "untouched True []" in output


def test_enable_patches_and_disable_undoes() -> None:
    output = run("")
    assert "SeamError" not in output
    assert "untouched False" in output
    output = run(
        "import ds_osdp; ds_osdp.enable(); ds_osdp.disable()\nAFTER_ENABLE = seams.installed()\nassert AFTER_ENABLE == []\n"
    )
    assert "SeamError" not in output
