"""Plans and their reasons for people: tables of units, alike units together."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ds_osdp.plan import Plan, Stage, UnitPlan
from ds_osdp.quantities import format_bytes, format_seconds

if TYPE_CHECKING:
    from ds_osdp.explain import BudgetPoint, Explanation

__all__ = ["explanation_renderable", "plan_renderable", "plan_text"]

# A whole component of a path: the 3 of "h.3.fc1", not its 1.
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def plan_text(plan: Plan, width: int = 100) -> str:
    """The plan as plain text, ``width`` characters wide."""
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(plan_renderable(plan))
    return capture.get().rstrip()


def plan_renderable(plan: Plan) -> RenderableType:
    """The plan as something rich can print: totals, then units by kind and stage."""
    table = Table(title=f"plan {plan.plan_hash}", title_justify="left")
    for heading, justify in (("units", "left"), ("count", "right"), ("stage", "right"), ("elements", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for name, units in _classes(plan.units):
        stage = units[0].stage
        table.add_row(
            name,
            str(len(units)),
            Text(str(int(stage)), style="green" if stage is Stage.REPLICATED else "cyan"),
            f"{sum(unit.elements for unit in units):,}",
        )
    proof = "proven optimal" if plan.gap == 0 else f"at most {100 * plan.gap:.2g}% from optimal"
    return Group(
        Text(
            f"{format_seconds(plan.step_seconds)} per step predicted ({proof}), {plan.samples_per_second:.3g} samples/s on "
            f"{plan.world_size} ranks, micro-batch {plan.micro_batch} x accumulation {plan.accumulation}"
        ),
        Text(
            f"{format_bytes(plan.peak_bytes)} peak per rank of {format_bytes(plan.budget_bytes)} allowed, "
            f"at the {plan.peak_moment}"
        ),
        Text(", ".join(f"{name} {size:,}" for name, size in plan.sizes)),
        table,
    )


def _classes(units: Iterable[UnitPlan]) -> list[tuple[str, list[UnitPlan]]]:
    """Units whose names differ in indices only and that share a stage, in order of first appearance."""
    found: dict[tuple[str, Stage], list[UnitPlan]] = {}
    for unit in units:
        if unit.parameters:
            found.setdefault((_NUMBER.sub("#", unit.name), unit.stage), []).append(unit)
    return [(_joined(group), group) for group in found.values()]


def _joined(units: list[UnitPlan]) -> str:
    """``h.0.fc``, ``h.1.fc``, ``h.4.fc`` -> ``h.{0-1,4}.fc``; more than one differing number stays ``#``."""
    names = [unit.name or "(model)" for unit in units]
    numbers = [[int(n) for n in _NUMBER.findall(name)] for name in names]
    differing = [i for i, column in enumerate(zip(*numbers, strict=True)) if len(set(column)) > 1]
    if len(differing) != 1:
        return names[0] if len(names) == 1 else _NUMBER.sub("#", names[0])
    values = sorted(row[differing[0]] for row in numbers)
    spans = []
    for _, run in groupby(enumerate(values), key=lambda pair: pair[1] - pair[0]):
        members = [value for _, value in run]
        spans.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    position = iter(range(len(numbers[0])))
    return _NUMBER.sub(lambda match: f"{{{','.join(spans)}}}" if next(position) == differing[0] else match.group(), names[0])


def explanation_renderable(plan: Plan, reasons: Explanation) -> RenderableType:
    """The reasons for a plan as something rich can print."""
    return Group(
        Text(f"{reasons.binding_moment} binds; {format_bytes(reasons.slack_bytes)} of the budget are left"),
        Text(f"1 GiB more: {_point(plan, reasons.one_gib_more)}; 1 GiB less: {_point(plan, reasons.one_gib_less)}"),
        _units_table(plan, reasons),
        _points_table(plan, reasons),
        *(Text(f"the rule {rule.match!r} costs {format_seconds(rule.seconds)} a step") for rule in reasons.rules),
    )


def _units_table(plan: Plan, reasons: Explanation) -> Table:
    table = Table(title="what memory buys", title_justify="left")
    for heading in ("units", "stage", "memory beyond leanest", "saved per step", "saved per GiB"):
        table.add_column(heading, justify="left" if heading == "units" else "right")
    reason_of = {reason.name: reason for reason in reasons.units}
    for name, units in _classes(plan.units):
        members = [reason_of[unit.name] for unit in units]
        spent, saved = sum(r.bytes_spent for r in members), sum(r.seconds_saved for r in members)
        per_gib = format_seconds(saved / spent * (1 << 30)) if spent > 0 else ""
        row = (format_bytes(spent), format_seconds(saved), per_gib) if spent > 0 else ("", "", "")
        table.add_row(name, str(int(units[0].stage)), *row)
    return table


def _points_table(plan: Plan, reasons: Explanation) -> Table:
    table = Table(title="against stock, and other budgets (all predicted)", title_justify="left")
    for heading in ("", "peak per rank", "seconds per step", "against this plan"):
        table.add_column(heading, justify="left" if not heading else "right")
    for stock in reasons.stock:
        fits = "" if stock.fits else " (does not fit)"
        ratio = f"{stock.step_seconds / plan.step_seconds:.2f}x"
        table.add_row(stock.name + fits, format_bytes(stock.peak_bytes), format_seconds(stock.step_seconds), ratio)
    for point in reasons.curve:
        name = f"plan for {format_bytes(point.budget_bytes)}"
        if point.step_seconds is None or point.peak_bytes is None:
            table.add_row(name, "", "nothing fits", "")
        else:
            ratio = f"{point.step_seconds / plan.step_seconds:.2f}x"
            table.add_row(name, format_bytes(point.peak_bytes), format_seconds(point.step_seconds), ratio)
    return table


def _point(plan: Plan, point: BudgetPoint) -> str:
    if point.step_seconds is None:
        return "nothing fits"
    return f"{format_seconds(point.step_seconds)} a step ({point.step_seconds / plan.step_seconds - 1:+.1%})"
