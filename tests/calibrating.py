"""Measure links, and lose ranks on the way; run on the ranks that ``launch`` starts."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ds_osdp.measure import cluster_of_this_job, links, machines_of_this_job, measure_cluster, ranks_per_node

CPU = torch.device("cpu")


def calibrations() -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    machines = machines_of_this_job(ranks_per_node(), torch.bfloat16)
    effort = links.Effort(sizes=(4 << 10, 64 << 10, 1 << 20), seconds=0.9)
    cluster = measure_cluster(machines, effort=effort)
    whole = torch.zeros(1 << 20)
    reduced = links._slowest_seconds(lambda begin: dist.all_reduce(whole, async_op=begin), 5, CPU)
    return {
        "cluster": cluster,
        "clusters": everyones(json.dumps(cluster.to_dict())),
        "all_reduce": float(np.median(reduced)),
        "slow": links._slowest_seconds(lambda begin: time.sleep(0.05 * rank), 2, CPU),
        "agreed": everyones(links._agreed(10 + rank, CPU)),
        **caching(machines),
        "absent": absent(machines),
    }


def everyones(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def caching(machines: Any) -> dict[str, Any]:
    """The same job started four times: the cache is empty, good, broken, and of another torch."""
    first, line = cluster_of_this_job(machines)
    lines = [line]
    again, line = cluster_of_this_job(machines)
    lines.append(line)
    for damage in (lambda text: "{", lambda text: text.replace(torch.__version__, "1.0")):
        if dist.get_rank() == 0:
            (path,) = Path(os.environ["DS_OSDP_CACHE"]).glob("cluster-*.json")
            path.write_text(damage(path.read_text()))
        lines.append(cluster_of_this_job(machines)[1])
    return {"lines": lines, "kept": everyones(json.dumps(first.to_dict())) + everyones(json.dumps(again.to_dict()))}


def absent(machines: Any) -> list[str]:
    """The last rank takes part in nothing after the first meeting."""
    meet, rank = links._Control.meet, dist.get_rank()

    def late(self: Any, step: str) -> None:
        if rank == 3 and step != "measuring the device":
            raise KeyboardInterrupt
        meet(self, step)

    links._Control.meet = late
    try:
        measure_cluster(machines, timeout_seconds=1.0)
        text = "nothing"
    except (Exception, KeyboardInterrupt) as error:
        text = f"{type(error).__name__}: {error}"
    finally:
        links._Control.meet = meet
    return everyones(text)
