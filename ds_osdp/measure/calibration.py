"""The links of a running job: measured once for a set of hosts, and kept in the user's cache."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_osdp.cluster import Cluster, Machines
from ds_osdp.errors import DocumentError
from ds_osdp.frozen import fingerprint
from ds_osdp.measure.links import measure_cluster

__all__ = ["cluster_of_this_job"]


def cluster_of_this_job(machines: Machines) -> tuple[Cluster, str]:
    """The links of this job's ranks, and a line that says where they come from.  Every rank must call it; all get the same.

    Rank 0 looks into its user's cache; what it finds there for just these machines counts for all ranks, and otherwise all
    measure, in under 3 s.

    Raises:
        CalibrationError: naming the rank that did not take part or finish.
    """
    path = _cache_path(machines)
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:
        found = list(_read(path, machines))
    dist.broadcast_object_list(found, src=0)
    kept, refused = found
    if kept is not None:
        return Cluster.from_dict(kept), f"links as measured on {kept['date']} ({path}; delete it to measure again)"
    cluster = measure_cluster(machines)
    # Only rank 0 writes and only it logs: the line need not be the same on all ranks.
    return cluster, f"links measured{refused}; {_write(cluster, path) if dist.get_rank() == 0 else ''}"


def _cache_path(machines: Machines) -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    # A place of its own for those who cannot move all of a user's cache: torch keeps what it has compiled there too.
    folder = Path(os.environ.get("DS_OSDP_CACHE") or Path(home, "ds_osdp"))
    return folder / f"cluster-{fingerprint(machines.model_dump(mode='json'))}.json"


def _read(path: Path, machines: Machines) -> tuple[dict[str, Any] | None, str]:
    """The cluster kept at ``path``, or why there is none, as a part of a sentence."""
    if not path.exists():
        return None, ""
    try:
        cluster = Cluster.load(path)
    except DocumentError as error:
        return None, f", since what was kept cannot be read ({error})"
    differences = cluster.machines.differences(machines) if cluster.machines else "it does not say on what it was measured"
    if differences:
        return None, f", since {path} was measured on others ({differences})"
    return cluster.to_dict(), ""


def _write(cluster: Cluster, path: Path) -> str:
    try:
        cluster.save(path)
    except OSError as error:
        # A job must not fail for want of a cache.
        return f"not kept: {error}"
    return f"kept in {path}"
