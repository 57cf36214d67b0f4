"""Plans and their reasons for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ds_osdp.errors import InfeasiblePlanError
from ds_osdp.plan import Plan, Stage, UnitPlan
from ds_osdp.quantities import format_bytes, format_seconds
from ds_osdp.report.words import classes, headline, moved_units, option_text, summary, verdict, why

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ds_osdp.explain import Alternative, Explanation

Number = TypeVar("Number", int, float)

__all__ = [
    "alternatives_renderable",
    "difference_renderable",
    "explanation_renderable",
    "plan_renderable",
    "plan_text",
    "sizes_renderable",
]


def plan_text(plan: Plan, width: int = 100) -> str:
    """The plan as plain text, ``width`` characters wide."""
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(plan_renderable(plan))
    return capture.get().rstrip()


def plan_renderable(plan: Plan) -> RenderableType:
    """The plan as something rich can print: totals, then units by kind and option."""
    table = _table(f"plan {plan.plan_hash}", "units", "count", "stage", "elements", "held", "busy")
    for name, option, units in classes(plan.units, lambda unit: option_text(unit, plan.world_size)):
        style = "green" if units[0].stage is Stage.REPLICATED else "cyan"
        sums = f"{sum(u.elements for u in units):,}", format_bytes(sum(u.held_bytes for u in units))
        busy = format_seconds(sum(unit.busy_seconds for unit in units))
        table.add_row(name, str(len(units)), Text(option, style=style), *sums, busy)
    return Group(*map(Text, summary(plan)), table)


def explanation_renderable(plan: Plan, reasons: Explanation) -> RenderableType:
    """The reasons for a plan as something rich can print."""
    return Group(
        Text(verdict(plan, reasons), style="bold"),
        *map(Text, headline(plan, reasons)),
        _units_table(plan, reasons),
        _points_table(plan, reasons),
        *(Text(f"the rule {rule.match!r} costs {format_seconds(rule.seconds)} a step") for rule in reasons.rules),
    )


def _units_table(plan: Plan, reasons: Explanation) -> Table:
    table = _table("what memory buys", "units", "stage", "memory spent", "saved per step", "per GiB")
    reason_of = {reason.name: reason for reason in reasons.units}
    for name, option, units in classes(plan.units, lambda unit: option_text(unit, plan.world_size)):
        members = [reason_of[unit.name] for unit in units]
        spent, saved = sum(r.bytes_spent for r in members), sum(r.seconds_saved for r in members)
        per_gib = format_seconds(saved / spent * (1 << 30)) if spent > 0 else ""
        row = (format_bytes(spent), format_seconds(saved), per_gib) if spent > 0 else ("", "", "")
        table.add_row(name, option, *row)
    return table


def _points_table(plan: Plan, reasons: Explanation) -> Table:
    table = _table("against stock, and other budgets (predicted)", "", "peak per rank", "per step", "ratio")
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


def alternatives_renderable(plan: Plan, units: Sequence[Sequence[Alternative]]) -> RenderableType:
    """Why each of ``units`` is what it is: all its options, everything else as the plan has it."""
    table = _table("if this unit alone were placed otherwise", "unit", "stage", "step", "peak per rank", "")
    for options in units:
        for other in options:
            change = f"{other.step_seconds / plan.step_seconds - 1:+.2%}"
            table.add_row(
                other.unit if other is options[0] else "",
                option_text(other.option, plan.world_size),
                format_seconds(other.step_seconds) + ("" if other.chosen else f" ({change})"),
                format_bytes(other.peak_bytes),
                why(plan, other),
                style="bold" if other.chosen else "",
                end_section=other is options[-1],
            )
    return table


def difference_renderable(one: Plan, other: Plan) -> RenderableType:
    """What changes from plan ``one`` to plan ``other``.

    Raises:
        PlanMismatchError: the plans are of different models.
    """
    moved = moved_units(one, other)
    totals = _table(f"{one.plan_hash} -> {other.plan_hash}", "", "one", "other", "change")
    batches = [f"{plan.micro_batch} x {plan.accumulation}" for plan in (one, other)]
    totals.add_row("ranks", str(one.world_size), str(other.world_size))
    totals.add_row("micro-batch x accumulation", *batches)
    totals.add_row(*_change("per step", one.step_seconds, other.step_seconds, format_seconds))
    totals.add_row(*_change("samples per second", one.samples_per_second, other.samples_per_second, "{:.3g}".format))
    totals.add_row(*_change("budget per rank", one.budget_bytes, other.budget_bytes, format_bytes))
    totals.add_row(*_change("peak per rank", one.peak_bytes, other.peak_bytes, format_bytes))
    totals.add_row(*_change("held between steps", one.resident_bytes, other.resident_bytes, format_bytes))
    if not moved:
        return Group(totals, Text("every unit is placed alike"))
    before = {new.name: old for old, new in moved}
    table = _table("units placed otherwise", "units", "count", "stage", "elements")

    def moves(unit: UnitPlan) -> str:
        return f"{option_text(before[unit.name], one.world_size)} -> {option_text(unit, other.world_size)}"

    for name, move, units in classes([new for _, new in moved], moves):
        table.add_row(name, str(len(units)), move, f"{sum(unit.elements for unit in units):,}")
    return Group(totals, table)


def sizes_renderable(plans: Mapping[int, Plan | InfeasiblePlanError]) -> RenderableType:
    """Will it fit, on how many ranks: one row for each number of them."""
    table = _table("on how many ranks", "ranks", "fits", "peak per rank", "budget", "per step", "samples/s", "per rank")
    for ranks, plan in plans.items():
        if isinstance(plan, InfeasiblePlanError):
            table.add_row(str(ranks), "no", format_bytes(plan.least_bytes), format_bytes(plan.budget_bytes), "", "", "")
            continue
        sizes = format_bytes(plan.peak_bytes), format_bytes(plan.budget_bytes)
        speed = format_seconds(plan.step_seconds), f"{plan.samples_per_second:.4g}", f"{plan.samples_per_second / ranks:.3g}"
        table.add_row(str(ranks), "yes", *sizes, *speed)
    return table


def _change(name: str, one: Number, other: Number, text: Callable[[Number], str]) -> tuple[str, str, str, str]:
    return name, text(one), text(other), f"{other / one - 1:+.1%}" if one and one != other else ""


def _table(title: str, *headings: str) -> Table:
    """Text to the left, numbers to the right."""
    table = Table(title=title, title_justify="left")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i == 0 or not heading else "right", overflow="fold")
    return table
