"""Every client trains as the same script without a plan does."""

from __future__ import annotations

import functools
import sys
import tempfile
from pathlib import Path
from typing import Any

import netlab
import pytest
from launch import on_ranks

ROOT = Path(__file__).resolve().parent.parent

EXAMPLES = ROOT / "examples"

CLIENTS = {"t5": 1e-5, "vit": 1e-5, "mixtral": 1e-5, "lora": 1e-5, "actor_critic": 1e-5, "trainer": 2**-7, "accelerate": 1e-5}
"""Each with how far its losses may be from stock's: in bf16 (trainer) an ulp, else the order of summation."""


@functools.cache
def clients() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return on_ranks(2, "clients:in_one_start", folder)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("client", CLIENTS)
def test_losses_are_those_without_a_plan(client: str) -> None:
    stock, planned = clients()[f"{client} stock"], clients()[f"{client} planned"]
    assert all(stages is None for stages in stock["stages"])
    assert all(stages for stages in planned["stages"])
    for name in stock.keys() - {"stages"}:
        assert planned[name] == pytest.approx(stock[name], rel=CLIENTS[client]), name


@pytest.mark.slow
@pytest.mark.ranks
def test_every_step_is_written_to_the_monitor() -> None:
    steps, seconds = clients()["measured"]
    assert steps == [1, 2, 3, 4]
    assert seconds > 0


@pytest.mark.slow
@pytest.mark.ranks
def test_two_engines_cannot_promise_the_same_memory_twice() -> None:
    assert "give each engine its share in osdp.memory_budget" in clients()["greedy"]


@pytest.mark.slow
@pytest.mark.ranks
def test_the_trainer_resumes_where_it_was() -> None:
    for kind in ("stock", "planned"):
        found = clients()[f"trainer {kind}"]
        assert found["resumed"][-2:] == pytest.approx(found["losses"][-2:], rel=2**-7)
    assert clients()["partitioned at load"]
    assert "model.safetensors" in clients()["saved"]


@pytest.mark.slow
@pytest.mark.ranks
def test_a_hostfile_over_two_hosts(tmp_path: Path) -> None:
    try:
        netlab.check_requirements()
    except netlab.NetLabError as reason:
        pytest.skip(str(reason))
    clients = EXAMPLES / "clients"
    hosts = tmp_path / "hosts"
    hosts.write_text("alpha slots=1\nbeta slots=1\n")
    launcher = Path(sys.executable).with_name("deepspeed")
    # Every host starts DeepSpeed's launcher itself, as on clusters whose scheduler does it: RANK is that of the host.
    command = (
        f"PATH={launcher.parent}:$PATH DS_ACCELERATOR=cpu PYTHONWARNINGS=ignore {sys.executable} {launcher} --hostfile {hosts} "
        f"--no_ssh --node_rank $RANK --master_addr $MASTER_ADDR --master_port $MASTER_PORT "
        f"--module ds_osdp.run {clients / 'untouched_mixtral.py'} --deepspeed_config {clients / 'ds_plain.json'}"
    )
    with (tmp_path / "printed").open("wb") as printed, netlab.NetLab(2) as lab:
        netlab.run_ranks(["bash", "-c", command], world=2, lab=lab, stdout=printed, timeout_seconds=240)
    found = (tmp_path / "printed").read_text()
    assert "planned True" in found
    assert "per step predicted" in found
