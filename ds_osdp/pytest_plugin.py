"""Let a test suite judge plans: every ZeRO-3 engine that a test makes gets a plan.

    pytest -p ds_osdp.pytest_plugin --osdp-plan half tests/

``--osdp-plan`` says which plan, the same on every rank and in every run: ``none`` (every unit at stage 3), ``all`` (every
unit at stage 0), ``half`` (every second unit at stage 0, the others at 3) or ``seed:N`` (a stage from 0 to 3 for each unit,
drawn with that seed).  Engines are planned in the process of pytest and in those it starts with :mod:`multiprocessing` or
``torch.multiprocessing``; scripts started by a launcher are not (start these with ``--module ds_osdp.run``).

What a plan cannot be combined with skips the test, with the reason.  The summary counts the engines that were planned.
"""

from __future__ import annotations

import functools
import inspect
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import process
from typing import TYPE_CHECKING, Any

import pytest

from ds_osdp.errors import UnsupportedError
from ds_osdp.plan import Plan, Provenance, Stage, UnitPlan, model_fingerprint

if TYPE_CHECKING:
    from torch import nn

    from ds_osdp.job import Job

__all__ = ["plan_for_test"]

_NAMED: dict[str, Callable[[int], Stage]] = {
    "none": lambda _: Stage.FULLY_SHARDED,
    "all": lambda _: Stage.REPLICATED,
    "half": lambda number: Stage.FULLY_SHARDED if number % 2 else Stage.REPLICATED,
}


def plan_for_test(module: nn.Module, choice: str, job: Job) -> Plan:
    """The plan that ``choice`` names; what it predicts is zero.

    Args:
        module: every submodule that owns parameters is a unit, in the order of definition.
        choice: a value of ``--osdp-plan``.
        job: the test's.
    """
    from ds_osdp.deepspeed_seams import full_shapes

    pick = _NAMED.get(choice)
    if pick is None:
        draw = random.Random(int(choice.partition(":")[2]))

        def pick(_: int) -> Stage:
            return Stage(draw.randrange(4))

    shapes = full_shapes(module)
    names: dict[str, list[str]] = {}
    for name in shapes:
        names.setdefault(name.rpartition(".")[0], []).append(name)
    units = []
    for number, (owner, parameters) in enumerate(names.items()):
        stage = pick(number)
        units.append(
            UnitPlan(
                name=owner,
                stage=stage,
                degree=1 if stage is Stage.REPLICATED else job.world_size,
                parameters=tuple(parameters),
                elements=sum(_numel(shapes[name]) for name in parameters),
            )
        )
    return Plan(
        world_size=job.world_size,
        micro_batch=job.micro_batch,
        accumulation=job.accumulation,
        step_seconds=0,
        bound_seconds=0,
        gap=0,
        samples_per_second=0,
        budget_bytes=1,
        resident_bytes=0,
        peak_bytes=0,
        peak_moment="not predicted",
        sizes=job.sizes,
        deferred_bucket_bytes=1 << 20,
        units=tuple(units),
        provenance=Provenance(
            model=type(module).__name__,
            model_fingerprint=model_fingerprint(shapes),
            cluster="",
            sample="",
            solver=f"--osdp-plan {choice}",
            ds_osdp_version="",
        ),
    )


def _numel(shape: tuple[int, ...]) -> int:
    return functools.reduce(lambda a, b: a * b, shape, 1)


# -- in every process


def _plan_engines(choice: str, record: str) -> Callable[[], None]:
    """Give every ZeRO-3 engine made in this process a plan, and write a line to the file ``record``; returns the undo."""
    import deepspeed

    from ds_osdp import deepspeed_seams as seams
    from ds_osdp import entry

    stock = deepspeed.initialize
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def planned(*args: Any, **kwargs: Any) -> Any:
        call = dict(signature.bind(*args, **kwargs).arguments)
        _, world_size = seams.init_distributed(
            distributed_port=call.get("distributed_port"), dist_init_required=call.get("dist_init_required")
        )
        ds_config = seams.read_config(call.get("args"), call.get("config"), call.get("config_params"))
        stage = (ds_config.get("zero_optimization") or {}).get("stage", 0)
        if stage != 3 or (call.get("optimizer") is None and "optimizer" not in ds_config):
            return stock(**call)
        try:
            job = entry.check_combination(ds_config, call, world_size)
        except UnsupportedError as error:
            pytest.skip(f"ds_osdp refuses: {error}")
        plan = plan_for_test(call["model"], choice, job)
        result = entry.apply_plan(stock, call, plan, world_size)
        with open(record, "a") as file:
            file.write(f"{os.environ.get('PYTEST_CURRENT_TEST', '')}\n")
        return result

    deepspeed.initialize = planned

    def undo() -> None:
        deepspeed.initialize = stock
        seams.uninstall()

    return undo


class _Planned:
    """The target of a process that plans its engines; it travels to the process by pickle."""

    def __init__(self, target: Callable[..., Any], choice: str, record: str) -> None:
        self._call = target, choice, record
        self._test = os.environ.get("PYTEST_CURRENT_TEST", "")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        target, choice, record = self._call
        os.environ["PYTEST_CURRENT_TEST"] = self._test
        _plan_engines(choice, record)
        return target(*args, **kwargs)


# -- in pytest's own


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--osdp-plan``."""
    parser.addoption("--osdp-plan", metavar="half|all|none|seed:N", type=_choice, help="plan every ZeRO-3 engine of a test")


def _choice(text: str) -> str:
    seed = text.partition("seed:")[2]
    if text not in _NAMED and not seed.isdecimal():
        raise pytest.UsageError(f"--osdp-plan is {text!r}: use half, all, none or seed:N")
    return text


class _Session:
    """Planning during one run of pytest."""

    def __init__(self, choice: str) -> None:
        self._choice = choice
        handle, self._record = tempfile.mkstemp(prefix="osdp-planned-")
        os.close(handle)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Iterator[None]:
        """Plan in this process and in every one that it starts."""
        stock_start = process.BaseProcess.start
        choice, record = self._choice, self._record

        def start(child: Any) -> None:
            if child._target is not None and not isinstance(child._target, _Planned):
                child._target = _Planned(child._target, choice, record)
            stock_start(child)

        undo = _plan_engines(choice, record)
        process.BaseProcess.start = start  # type: ignore[method-assign,assignment]
        try:
            return (yield)
        finally:
            process.BaseProcess.start = stock_start  # type: ignore[method-assign]
            undo()

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say how much was planned: a suite that makes no engine proves nothing."""
        with open(self._record) as file:
            tests = [line.strip() for line in file]
        os.unlink(self._record)
        terminalreporter.write_line(
            f"osdp: {len(tests)} ZeRO-3 engines planned ({self._choice}), each rank counted, in {len(set(tests))} tests"
        )


def pytest_configure(config: pytest.Config) -> None:
    """Begin when a plan was asked for."""
    choice = config.getoption("--osdp-plan")
    if choice is not None:
        config.pluginmanager.register(_Session(choice), "ds_osdp plans")
