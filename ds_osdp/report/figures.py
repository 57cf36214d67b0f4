"""The figures of a report, drawn by plotly: memory, schedule, units, budgets, and predicted against measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from ds_osdp.plan import Plan, Stage
from ds_osdp.quantities import format_bytes, format_seconds
from ds_osdp.report.words import option_text
from ds_osdp.schedule import Operation

if TYPE_CHECKING:
    from ds_osdp.explain import Explanation
    from ds_osdp.report.measured import Measured

__all__ = ["STAGE_COLOURS", "figures"]

GIB = 1 << 30

# Okabe and Ito's colours, which people with any colour vision can tell apart; all stand out on white and on near-black.
STAGE_COLOURS = {
    Stage.REPLICATED: "#009e73",
    Stage.OPTIMIZER_STATES: "#56b4e9",
    Stage.GRADIENTS: "#e69f00",
    Stage.FULLY_SHARDED: "#cc79a7",
}
_KIND_COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#999999", "#e69f00", "#cc79a7", "#d55e00", "#f0e442")
_MACHINES = {"gather": "#cc79a7", "compute": "#0072b2", "reduce": "#e69f00"}
_ACCENT, _WARNING = "#0072b2", "#d55e00"
_QUIET = "#7a828a"
_SYMBOLS = ("circle", "square", "triangle-up", "diamond", "hexagon")

_BARS_PER_PASS = 1000
"""What a screen can show: shorter operations are drawn together with their neighbours."""


def figures(plan: Plan, reasons: Explanation, measured: Measured | None) -> dict[str, Any]:
    """The figures by name, in the order of the page."""
    drawn = {
        "memory": _memory(plan, reasons),
        "schedule": _schedule(reasons),
        "units": _units(plan, reasons),
        "budgets": _budgets(plan, reasons),
    }
    if measured is not None:
        drawn["measured"] = _measured(plan, measured)
    for figure in drawn.values():
        figure.update_layout(
            margin={"l": 8, "r": 8, "t": figure.layout.margin.t or 24, "b": 8},
            paper_bgcolor="rgba(0,0,0,0)",
            plot_bgcolor="rgba(0,0,0,0)",
            font={"family": "system-ui, sans-serif", "size": 13},
            legend={"orientation": "h", "y": -0.25, "yanchor": "top", "x": 0},
        )
        figure.update_xaxes(automargin=True, fixedrange=False)
        figure.update_yaxes(automargin=True, fixedrange=True)
    return drawn


def _memory(plan: Plan, reasons: Explanation) -> Any:
    moments = reasons.timeline
    passes = sum(moment.name.startswith("forward") for moment in moments)
    # The update is one moment beside hundreds: it gets the width of a few, or nobody would see it.
    width = max(1, len(moments) // 16)
    edges = [*range(2 * passes), *(2 * passes + width * i for i in range(len(moments) - 2 * passes + 1))]
    drawn = [*moments, moments[-1]]
    figure = go.Figure()
    for colour, kind in zip(_KIND_COLOURS, moments[0].bytes, strict=False):
        sizes = [moment.bytes[kind] for moment in drawn]
        figure.add_scatter(
            x=edges,
            y=[size / GIB for size in sizes],
            name=kind.replace("_", " "),
            stackgroup="held",
            line={"width": 0, "shape": "hv", "color": colour},
            fillcolor=colour,
            customdata=[format_bytes(size) for size in sizes],
            hovertemplate="%{customdata}",
        )
    figure.add_scatter(
        x=edges,
        y=[moment.total_bytes / GIB for moment in drawn],
        name="all",
        mode="lines",
        line={"width": 1, "shape": "hv", "color": _QUIET},
        showlegend=False,
        customdata=[f"{moment.name}: {format_bytes(moment.total_bytes)}" for moment in drawn],
        hovertemplate="<b>%{customdata}</b><extra></extra>",
    )
    budget = f"budget {format_bytes(plan.budget_bytes)}"
    figure.add_hline(plan.budget_bytes / GIB, line={"color": _WARNING, "dash": "dash"}, annotation_text=budget)
    for edge in (passes, 2 * passes):
        figure.add_vline(edge, line={"color": _QUIET, "width": 1, "dash": "dot"})
    ends = (("forward", passes / 2), ("backward", 1.5 * passes), ("update", 2 * passes + (edges[-1] - 2 * passes) / 2))
    figure.update_xaxes(tickvals=[at for _, at in ends], ticktext=[name for name, _ in ends], showgrid=False)
    figure.update_yaxes(title="GiB per rank", rangemode="tozero")
    figure.update_layout(hovermode="x unified", height=420)
    return figure


def _schedule(reasons: Explanation) -> Any:
    figure = go.Figure()
    begin = 0.0
    rows: dict[str, list[tuple[float, float, str]]] = {machine: [] for machine in _MACHINES}
    for position, part in enumerate(reasons.schedule):
        for machine in _MACHINES:
            own = [operation for operation in part.operations if operation.machine == machine]
            for first, last, count in _merged(own, part.duration_ns // _BARS_PER_PASS):
                name = first.unit if count == 1 else f"{count} operations, {first.unit} to {last.unit}"
                rows[machine].append(
                    (begin + first.begin_ns / 1e6, (last.end_ns - first.begin_ns) / 1e6, f"{part.name}: {name}")
                )
        times = f" ×{part.times}" if part.times > 1 else ""
        figure.add_annotation(
            x=begin,
            y=1.0,
            yref="paper",
            xanchor="left",
            yanchor="bottom",
            # On a phone neighbouring names would overlap on one line.
            yshift=14 * (position % 2),
            text=f"{part.name}{times}",
            showarrow=False,
        )
        figure.add_vline(begin, line={"color": _QUIET, "width": 1, "dash": "dot"})
        begin += part.duration_ns / 1e6
    for machine, bars in rows.items():
        figure.add_bar(
            x=[duration for _, duration, _ in bars],
            y=[machine] * len(bars),
            base=[start for start, _, _ in bars],
            name=machine,
            orientation="h",
            marker={"color": _MACHINES[machine], "line": {"width": 0}},
            customdata=[f"{name}<br>{format_seconds(duration / 1e3)}" for _, duration, name in bars],
            hovertemplate="%{customdata}<extra></extra>",
            showlegend=False,
        )
    figure.update_xaxes(title="ms", showgrid=False)
    figure.update_yaxes(categoryorder="array", categoryarray=list(_MACHINES)[::-1], showgrid=False)
    figure.update_layout(barmode="overlay", bargap=0.25, height=280, margin={"t": 48})
    return figure


def _merged(operations: Sequence[Operation], least_ns: int) -> Iterator[tuple[Operation, Operation, int]]:
    """Neighbours without a pause between them as one, until it is ``least_ns`` long: first, last and how many."""
    first: Operation | None = None
    last, count = first, 0
    for operation in operations:
        if (
            first is not None
            and last is not None
            and (operation.begin_ns > last.end_ns or last.end_ns - first.begin_ns >= least_ns)
        ):
            yield first, last, count
            first = None
        if first is None:
            first, count = operation, 0
        last, count = operation, count + 1
    if first is not None and last is not None:
        yield first, last, count


def _units(plan: Plan, reasons: Explanation) -> Any:
    units = {unit.name: unit for unit in plan.units if unit.elements}
    reason_of = {reason.name: reason for reason in reasons.units}
    paths = dict.fromkeys(".".join(name.split(".")[: i + 1]) for name in units for i in range(name.count(".") + 1) if name)
    # The model itself stands at the root, also where it owns parameters of its own.
    nodes = ["", *paths]

    def hover(name: str) -> str:
        if name not in units:
            return name or plan.provenance.model
        unit, reason = units[name], reason_of[name]
        bought = (
            f"<br>saves {format_seconds(reason.seconds_saved)} a step for {format_bytes(reason.bytes_spent)}"
            if reason.bytes_spent > 0
            else ""
        )
        return f"<b>{name or '(model)'}</b><br>stage {option_text(unit, plan.world_size)}<br>{unit.elements:,} elements{bought}"

    figure = go.Figure(
        go.Treemap(
            ids=[name or "model" for name in nodes],
            labels=[name.rpartition(".")[2] or plan.provenance.model for name in nodes],
            parents=["" if not name else name.rpartition(".")[0] or "model" for name in nodes],
            values=[units[name].elements if name in units else 0 for name in nodes],
            branchvalues="remainder",
            marker={
                "colors": [STAGE_COLOURS[units[name].stage] if name in units else "rgba(0,0,0,0)" for name in nodes],
                "line": {"width": 1, "color": "rgba(128,128,128,0.5)"},
                "pad": {"t": 18, "l": 1, "r": 1, "b": 1},
            },
            textfont={"size": 11, "color": ["#111111" if name in units else _QUIET for name in nodes]},
            customdata=[hover(name) for name in nodes],
            hovertemplate="%{customdata}<extra></extra>",
            sort=False,
            tiling={"pad": 0},
            pathbar={"visible": False},
        )
    )
    figure.update_layout(height=460)
    return figure


def _budgets(plan: Plan, reasons: Explanation) -> Any:
    figure = go.Figure()
    found = {(p.budget_bytes, p.step_seconds) for p in reasons.curve if p.step_seconds is not None}
    curve = sorted({*found, (plan.budget_bytes, plan.step_seconds)})
    figure.add_scatter(
        x=[budget / GIB for budget, _ in curve],
        y=[seconds * 1e3 for _, seconds in curve],
        mode="lines+markers",
        name="best plan",
        line={"color": _ACCENT, "shape": "hv"},
        hovertemplate="budget %{x:.3g} GiB: %{y:.4g} ms<extra>best plan</extra>",
    )
    for symbol, point in zip(_SYMBOLS, reasons.stock, strict=True):
        figure.add_scatter(
            x=[point.peak_bytes / GIB],
            y=[point.step_seconds * 1e3],
            mode="markers",
            name=point.name if point.fits else f"{point.name} (does not fit)",
            marker={"symbol": symbol if point.fits else f"{symbol}-open", "size": 12, "color": "#e69f00", "line": {"width": 2}},
            hovertemplate="peak %{x:.3g} GiB, %{y:.4g} ms",
        )
    figure.add_scatter(
        x=[plan.budget_bytes / GIB],
        y=[plan.step_seconds * 1e3],
        mode="markers",
        name="this plan",
        marker={"symbol": "star", "size": 16, "color": _WARNING},
        hovertemplate="this plan: budget %{x:.3g} GiB, %{y:.4g} ms<extra></extra>",
    )
    figure.update_xaxes(title="GiB per rank")
    figure.update_yaxes(title="ms per step", rangemode="tozero")
    figure.update_layout(height=420)
    return figure


def _measured(plan: Plan, measured: Measured) -> Any:
    figure = go.Figure()
    figure.add_scatter(
        x=list(measured.step_seconds),
        y=[seconds * 1e3 for seconds in measured.step_seconds.values()],
        mode="lines+markers",
        name="measured",
        line={"color": _ACCENT},
    )
    predicted = f"predicted {format_seconds(plan.step_seconds)}"
    figure.add_hline(plan.step_seconds * 1e3, line={"color": _WARNING, "dash": "dash"}, annotation_text=predicted)
    figure.update_xaxes(title="optimizer step")
    figure.update_yaxes(title="ms per step", rangemode="tozero")
    figure.update_layout(height=360)
    return figure
