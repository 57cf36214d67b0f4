"""What tables and pages say alike: alike units together, options by name, the verdict."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import TYPE_CHECKING

from ds_osdp.errors import PlanMismatchError
from ds_osdp.plan import Plan, UnitPlan
from ds_osdp.quantities import format_bytes, format_seconds
from ds_osdp.schedule import exposed_seconds

if TYPE_CHECKING:
    from ds_osdp.explain import Alternative, BudgetPoint, Explanation
    from ds_osdp.prices import Option

__all__ = ["classes", "headline", "moved_units", "option_text", "proof", "summary", "verdict", "why"]

WORTH = 1.03
"""Below this ratio to the best stock configuration a predicted gain is within what predictions miss."""

# A whole component of a path: the 3 of "h.3.fc1", not its 1.
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def summary(plan: Plan) -> list[str]:
    """What a plan promises: its speed and its memory, one sentence each."""
    return [
        f"{format_seconds(plan.step_seconds)} per step predicted ({proof(plan)}), {_rate(plan)} samples/s on "
        f"{plan.world_size} ranks, micro-batch {plan.micro_batch} x accumulation {plan.accumulation}",
        f"{format_bytes(plan.peak_bytes)} peak per rank of {format_bytes(plan.budget_bytes)} allowed, "
        f"at the {plan.peak_moment}",
        ", ".join(f"{name} {size:,}" for name, size in plan.sizes),
    ]


def _rate(plan: Plan) -> str:
    value = plan.samples_per_second
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def proof(plan: Plan) -> str:
    """How near the best plan this one is."""
    return "proven optimal" if plan.gap == 0 else f"at most {100 * plan.gap:.2g}% from optimal"


def verdict(plan: Plan, reasons: Explanation) -> str:
    """Whether the plan is worth it on these machines."""
    stock = reasons.best_stock
    if stock is None:
        return "No stock configuration fits this budget; the plan does."
    ratio = stock.step_seconds / plan.step_seconds
    if ratio < WORTH:
        took = format_seconds(stock.step_seconds)
        return f"Not worth a plan here: {stock.name} fits, and is predicted to be as fast ({took} a step)."
    return f"{ratio:.2f}x as fast as {stock.name}, the best stock configuration that fits (predicted)."


def headline(plan: Plan, reasons: Explanation) -> list[str]:
    """What binds, what is waited for, and what more memory would buy: one sentence each."""
    exposed = exposed_seconds(reasons.schedule)
    delta = format_bytes(reasons.more.budget_bytes - plan.budget_bytes)
    return [
        f"The {reasons.binding_moment} binds; {format_bytes(reasons.slack_bytes)} of the budget are left.",
        f"Communication that nothing hides takes {format_seconds(exposed)} of the step ({exposed / plan.step_seconds:.0%}).",
        f"{delta} more: {_point(plan, reasons.more)}. {delta} less: {_point(plan, reasons.less)}.",
    ]


def _point(plan: Plan, point: BudgetPoint) -> str:
    if point.step_seconds is None:
        return "nothing fits"
    return f"{format_seconds(point.step_seconds)} a step ({point.step_seconds / plan.step_seconds - 1:+.1%})"


def why(plan: Plan, other: Alternative) -> str:
    """Why a unit does not have this option, or that it does."""
    if other.chosen:
        return "chosen"
    if not other.fits:
        return f"{format_bytes(other.peak_bytes - plan.budget_bytes)} over the budget"
    return "fits, and is no faster" if other.step_seconds >= plan.step_seconds else "fits, and is faster by less than the gap"


def option_text(option: Option | UnitPlan, world_size: int) -> str:
    """The stage, and what is special beside it: ``3 over 8 ranks, in 4 slices, recomputed``."""
    parts = [
        str(int(option.stage)) + (f" over {option.degree} ranks" if option.degree not in (1, world_size) else ""),
        f"in {option.slices} slices" + (f", {option.whole_slices} of them whole" if option.whole_slices else "")
        if option.slices > 1
        else "",
        "recomputed" if option.recompute else "",
    ]
    return ", ".join(part for part in parts if part)


def moved_units(one: Plan, other: Plan) -> list[tuple[UnitPlan, UnitPlan]]:
    """Units that two plans of one model place otherwise: as in ``one``, and as in ``other``.

    Raises:
        PlanMismatchError: the plans are of different models.
    """
    a, b = one.provenance, other.provenance
    before = {unit.name: unit for unit in one.units}
    if a.model_fingerprint != b.model_fingerprint or any(unit.name not in before for unit in other.units):
        raise PlanMismatchError(f"the plans are of different models, or of different sizes of one: {a.model} and {b.model}")
    return [
        (before[unit.name], unit)
        for unit in other.units
        if option_text(before[unit.name], one.world_size) != option_text(unit, other.world_size)
    ]


def classes(units: Iterable[UnitPlan], label: Callable[[UnitPlan], str]) -> list[tuple[str, str, list[UnitPlan]]]:
    """Units with parameters whose names differ in indices only and whose label is the same, in order of appearance.

    Returns:
        The joined name, the label and the units of each class.
    """
    found: dict[tuple[str, str], list[UnitPlan]] = {}
    for unit in units:
        if unit.parameters:
            found.setdefault((_NUMBER.sub("#", unit.name), label(unit)), []).append(unit)
    return [(_joined(group), key[1], group) for key, group in found.items()]


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
