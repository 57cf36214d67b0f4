"""Several hosts with limited links on one machine: collectives pay for their bytes without a cluster.

    python benchmarks/netlab.py --hosts 2 --ranks-per-host 1 --rate 1gbit -- python train.py ...
    python benchmarks/netlab.py --clean    # after a SIGKILL, which leaves the lab no chance to tidy up

Each host is a network namespace with one link to a switch, a bridge in a namespace of its own: nothing is added to
the machine's own namespace, and deleting the namespaces deletes every link. A token bucket (tc tbf) on the host's end
of a link limits what the host sends, one on the switch's end what it receives; the kernel's TCP does the rest. There
is no added latency, and the ranks share the machine's cores. Needs root, iproute2, and veth, bridge and tbf in the
kernel; `--loopback` (or `--hosts 1`) needs none of them and starts the ranks on the machine's own loopback.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

PREFIX = "netlab"
DEVICE = "eth0"  # the name of the link inside each host
BURST, QUEUE = "128kb", "32mb"  # small enough to hold the rate over one message, deep enough not to drop
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SECONDS_TO_FAIL = 1.0  # a failed rank takes others down with it: let them write their own reason
SECONDS_TO_END = 5.0
TIMED_OUT = 124
_serials = itertools.count()


class NetLabError(RuntimeError):
    """The lab cannot be built here."""


class RanksFailedError(RuntimeError):
    """Ranks ended with an error, or did not end in time; `status` is the exit status of the first that failed."""

    def __init__(self, statuses: dict[int, int], logs: Sequence[Path]) -> None:
        self.status = next(iter(statuses.values()))
        tails = {rank: logs[rank].read_text(errors="replace").strip()[-2000:] or "(empty)" for rank in statuses}
        super().__init__("\n".join(f"rank {r} ended with status {s}; its log ends:\n{tails[r]}" for r, s in statuses.items()))


class NetLab:
    """Hosts, links and switch; they exist inside the `with` block only."""

    def __init__(self, hosts: int, rate: str | None = None) -> None:
        self.rate = rate
        # The maker's pid tells `clean` whose lab it is; the serial tells one process's labs apart.
        base = f"{PREFIX}-{os.getpid()}-{next(_serials)}"
        self.hosts = [f"{base}-host{i}" for i in range(hosts)]
        self.switch = f"{base}-switch"

    def __enter__(self) -> NetLab:
        check_requirements()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Delete the namespaces, and with them the links; a signal has to wait until that is done."""
        with _signals_held():
            for namespace in (*self.hosts, self.switch):
                _delete(namespace)

    def address(self, host: int) -> str:
        """The host's address; every lab uses the same ones, for no two labs are connected."""
        return f"10.213.7.{host + 1}"

    def bytes_sent(self) -> list[int]:
        """Bytes each host has put on its link since the lab was built, headers included."""
        links = [json.loads(_run("ip", "-n", host, "-s", "-j", "link", "show", DEVICE))[0] for host in self.hosts]
        return [link["stats64"]["tx"]["bytes"] for link in links]

    def _build(self) -> None:
        _run("ip", "netns", "add", self.switch)
        _run("ip", "-n", self.switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self.switch, "link", "set", "bridge", "up")
        for i, host in enumerate(self.hosts):
            port = f"port{i}"
            _run("ip", "netns", "add", host)
            _run(*f"ip link add {DEVICE} netns {host} type veth peer name {port} netns {self.switch}".split())
            _run("ip", "-n", self.switch, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", host, "addr", "add", f"{self.address(i)}/24", "dev", DEVICE)
            _run("ip", "-n", host, "link", "set", DEVICE, "up")
            _run("ip", "-n", host, "link", "set", "lo", "up")
            if self.rate:
                bucket = ("root", "tbf", "rate", self.rate, "burst", BURST, "limit", QUEUE)
                _run("tc", "-n", host, "qdisc", "add", "dev", DEVICE, *bucket)
                _run("tc", "-n", self.switch, "qdisc", "add", "dev", port, *bucket)


def check_requirements() -> None:
    """Raise NetLabError where namespaces cannot be made."""
    if not (shutil.which("ip") and shutil.which("tc")):
        raise NetLabError("the lab needs the commands ip and tc: install iproute2, or use --loopback")
    if os.geteuid() != 0:
        raise NetLabError("the lab needs root to make network namespaces: run as root, or use --loopback")


def clean() -> list[str]:
    """Delete the namespaces whose maker is gone, with whatever still runs in them; return their names."""
    check_requirements()
    names = [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.startswith(f"{PREFIX}-")]
    orphans = [name for name in names if not Path("/proc", name.split("-")[1]).exists()]
    for name in orphans:
        _delete(name)
    return orphans


def run_ranks(
    command: Sequence[str],
    *,
    world: int,
    lab: NetLab | None = None,
    stdout: IO[bytes] | None = None,
    timeout_seconds: float = float("inf"),
) -> None:
    """Run the command once per rank, spread evenly over the lab's hosts or, without a lab, all on loopback.

    Rank 0's standard output goes to `stdout` (by default the caller's), all else to logs that are shown on failure.
    The first failure ends the other ranks and raises RanksFailedError.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}-") as log_dir:
        logs = [Path(log_dir, f"rank{rank}.log") for rank in range(world)]
        try:
            for rank, (prefix, environment) in enumerate(_places(world, lab)):
                # What is measured of a lab's links must not be taken for this machine's later.
                environment["DS_OSDP_CACHE"] = log_dir
                with logs[rank].open("wb") as log:
                    out = stdout if rank == 0 else log
                    # Its own session, so that a rank can be ended together with the processes it started.
                    ranks.append(
                        subprocess.Popen([*prefix, *command], env=environment, stdout=out, stderr=log, start_new_session=True)
                    )
            failures = _wait(ranks, timeout_seconds)
        finally:
            _end(ranks)
        if failures:
            raise RanksFailedError(failures, logs)


def _places(world: int, lab: NetLab | None) -> list[tuple[list[str], dict[str, str]]]:
    """Per rank: what to put before a command to start it on the rank's host, and its environment."""
    per_host, rest = divmod(world, len(lab.hosts) if lab else 1)
    if rest:
        raise ValueError(f"{world} ranks cannot be spread evenly over the hosts")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    shared = os.environ | {
        "WORLD_SIZE": str(world),
        "LOCAL_SIZE": str(per_host),
        "LOCAL_WORLD_SIZE": str(per_host),
        "MASTER_ADDR": lab.address(0) if lab else "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": DEVICE if lab else "lo",
        "OMP_NUM_THREADS": "1",
    }
    return [
        (
            ["ip", "netns", "exec", lab.hosts[rank // per_host]] if lab else [],
            shared | {"RANK": str(rank), "LOCAL_RANK": str(rank % per_host)},
        )
        for rank in range(world)
    ]


def _wait(ranks: Sequence[subprocess.Popen[bytes]], timeout_seconds: float) -> dict[int, int]:
    """Wait until all ranks have ended, one has failed or the time is up; exit statuses in the order of failure."""
    deadline = time.monotonic() + timeout_seconds
    failures: dict[int, int] = {}
    while True:
        statuses = [process.poll() for process in ranks]
        for rank, status in enumerate(statuses):
            if status and rank not in failures:
                failures[rank] = status if status > 0 else 128 - status  # as a shell reports death by a signal
                deadline = min(deadline, time.monotonic() + SECONDS_TO_FAIL)
        if None not in statuses:
            return failures
        if time.monotonic() > deadline:
            return failures or {rank: TIMED_OUT for rank, status in enumerate(statuses) if status is None}
        time.sleep(0.05)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    with _signals_held():
        for how in (signal.SIGTERM, signal.SIGKILL):
            for process in ranks:
                if process.poll() is None:
                    os.killpg(process.pid, how)
            deadline = time.monotonic() + SECONDS_TO_END
            while time.monotonic() < deadline and any(process.poll() is None for process in ranks):
                time.sleep(0.05)


def exit_on_signals() -> None:
    """Leave through SystemExit on the usual ways of being stopped, so that `with` and `finally` tidy up."""

    def leave(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    for number in STOP_SIGNALS:
        signal.signal(number, leave)


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetLabError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def _delete(namespace: str) -> None:
    """Delete the namespace if it is there, and first what runs in it: a process would keep its links alive."""
    with contextlib.suppress(NetLabError):
        for pid in _run("ip", "netns", "pids", namespace).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _run("ip", "netns", "del", namespace)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--rate", help="limit of each link, each way, in tc's words: 400mbit, 1gbit (default: none)")
    parser.add_argument("--loopback", action="store_true", help="all ranks on the machine's loopback; needs no root")
    parser.add_argument("--timeout-seconds", type=float, default=float("inf"))
    parser.add_argument("--clean", action="store_true", help="delete the labs whose maker is gone, and do nothing else")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- command")
    arguments = parser.parse_args()
    arguments.command = arguments.command[arguments.command[:1] == ["--"] :]
    arguments.loopback |= arguments.hosts == 1
    if not arguments.clean and not arguments.command:
        parser.error("no command to run")
    if arguments.loopback and arguments.rate:
        parser.error("--rate limits links, and loopback has none")
    return arguments


def main() -> int:
    """Run the command line; the exit status is 0, the first failed rank's, or 2 where there can be no lab."""
    arguments = _arguments()
    exit_on_signals()
    try:
        if arguments.clean:
            print("\n".join(clean()) or "nothing to delete")
            return 0
        lab = None if arguments.loopback else NetLab(arguments.hosts, arguments.rate)
        world = arguments.hosts * arguments.ranks_per_host
        with lab or contextlib.nullcontext():
            run_ranks(arguments.command, world=world, lab=lab, timeout_seconds=arguments.timeout_seconds)
            for host, sent in enumerate(lab.bytes_sent() if lab else ()):
                print(f"host {host} sent {sent / 1e6:.1f} MB", file=sys.stderr)
    except NetLabError as error:
        print(f"netlab: {error}", file=sys.stderr)
        return 2
    except RanksFailedError as error:
        print(f"netlab: {error}", file=sys.stderr)
        return error.status
    return 0


if __name__ == "__main__":
    sys.exit(main())
