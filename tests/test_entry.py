"""Three ways in, one behaviour; and whatever cannot be meant is refused on every rank at once."""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launch import on_ranks


def test_importing_patches_nothing_and_loads_neither_deepspeed_nor_pyomo() -> None:
    code = "import sys, ds_osdp; print(sorted({'deepspeed', 'pyomo', 'torch', 'highspy'} & set(sys.modules)), ds_osdp.Plan)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("[] ")


@functools.cache
def ways() -> dict[str, Any]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return on_ranks(2, "entries:ways_in", folder)


@pytest.mark.ranks
@pytest.mark.parametrize("way", ["initialize", "enable", "path", "arguments", "saved plan, losses"])
def test_every_way_in_trains_alike(way: str) -> None:
    assert ways()[way] == pytest.approx(ways()["stock"], rel=1e-6)


@pytest.mark.ranks
def test_patches_come_and_go_together() -> None:
    assert ways()["patches before"] == ways()["patches after"] == []
    assert len(ways()["patches during"]) == 16
    assert ways()["restored"]
    assert ways()["stock again"] == ways()["stock"] == ways()["without a section, losses"]


@pytest.mark.ranks
def test_a_module_is_planned_again_after_its_engine_is_destroyed() -> None:
    assert ways()["the same module twice, planned"] == pytest.approx(ways()["the same module twice, stock"], rel=1e-6)


@pytest.mark.ranks
def test_a_rank_that_dies_ends_the_others() -> None:
    found = on_ranks(2, "entries:a_rank_dies")
    assert "onnection" in found["error"], found
    assert found["seconds"] < 60


@pytest.mark.ranks
def test_enable_wraps_deepspeed_initialize() -> None:
    assert ways()["enabled is planned"]
    assert ways()["signature kept"]
    assert ways()["enable plans"] == [0, 3]
    assert not ways()["without a section"]
    assert not ways()["switched off"]
    assert ways()["saved plan"]


@pytest.mark.ranks
def test_takes_what_deepspeed_initialize_takes() -> None:
    code = (
        "import deepspeed, ds_osdp, inspect\n"
        "for f in (deepspeed.initialize, ds_osdp.initialize):\n"
        "    print([(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()])"
    )
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    theirs, ours = done.stdout.strip().splitlines()[-2:]
    assert ours == theirs


@pytest.mark.ranks
def test_a_bare_section_measures_everything() -> None:
    found = on_ranks(2, "entries:measured_start")
    assert found["budget"] > 1 << 28
    assert found["losses"] == pytest.approx(ways()["stock"], rel=1e-6)
    assert 3 not in found["stages"], "with memory to spare nothing needs gathering"
    assert found["bucket held"] == found["bucket planned"] < 500_000_000, "what the JSON leaves open comes with the plan"


@pytest.mark.ranks
def test_a_micro_batch_is_chosen_where_deepspeed_builds_the_loader() -> None:
    found = on_ranks(2, "entries:micro_batches")
    assert found["global"][0] == found["global"][1]
    assert found["micro"] == found["planned"] == [found["loader"], 1]
    assert found["loader"] == 4, "all stage 0 reads its weights once per micro-step: fewer are faster"


@pytest.mark.ranks
def test_nodes_are_used_where_their_links_are_known() -> None:
    found = on_ranks(4, "entries:on_nodes", environment={"LOCAL_WORLD_SIZE": "2"})
    assert found["degrees"] == [2]
    assert found["losses"] == pytest.approx(found["stock"], rel=1e-5)
    assert found["foreign"].count("ClusterMismatchError: osdp.cluster (test)") == 4
    assert "it has 3 ranks per node, the job 2" in found["foreign"]


@functools.cache
def refused() -> dict[str, str]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return on_ranks(2, "entries:refusals", folder)


REFUSALS = {
    "no section": "ConfigError: the DeepSpeed configuration has no 'osdp' section",
    "near miss": "did you mean 'osdp'",
    "unknown key": "did you mean 'memory_budget'",
    "size": "'3GB '",
    "stage 2": "set it to 3",
    "offload": "UnsupportedError: zero_optimization.offload_optimizer",
    "mpu": "UnsupportedError",
    "rule matches nothing": "'decoder.*'",
    "too small": "InfeasiblePlanError",
    "no input": "osdp.input",
    "plan of another model": "PlanMismatchError",
    "one rank's JSON differs": "RankMismatchError: the DeepSpeed configuration of rank 1 differs from rank 0's in 'osdp'",
    "one rank has no section": "rank 0 fails",
    "one rank's JSON is bad": "rank 0 fails",
    "rank 0 fails unexpectedly": "rank 0 could not plan",
}


@pytest.mark.ranks
@pytest.mark.parametrize("case", REFUSALS)
def test_bad_input_is_refused_on_all_ranks(case: str) -> None:
    message = refused()[case]
    assert REFUSALS[case] in message
    assert "nothing" not in message.split(" | ")


@pytest.mark.ranks
def test_a_refusal_leaves_nothing_behind() -> None:
    assert refused()["untouched"] == "True"
    assert refused()["afterwards"] == "True"


def test_the_runner_names_a_missing_script(tmp_path: Path) -> None:
    for arguments, text in (([], "usage"), (["nowhere.py"], "nowhere.py"), (["--flag"], "usage")):
        done = subprocess.run([sys.executable, "-m", "ds_osdp.run", *arguments], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 1
        assert text in done.stderr


def test_signatures_are_explicit() -> None:
    import ds_osdp

    assert "config_params" in inspect.signature(ds_osdp.initialize).parameters
