"""A report as files: one page that needs no network, or one picture a figure."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_osdp.errors import ConfigError
from ds_osdp.frozen import write_whole
from ds_osdp.plan import Plan, Stage
from ds_osdp.quantities import format_bytes, format_seconds
from ds_osdp.report.words import classes, headline, option_text, summary, verdict

if TYPE_CHECKING:
    from ds_osdp.explain import Explanation
    from ds_osdp.report.measured import Measured

__all__ = ["write_page", "write_pictures"]

_STAGE_NAMES = {
    Stage.REPLICATED: "0: replicated",
    Stage.OPTIMIZER_STATES: "1: optimizer states sharded",
    Stage.GRADIENTS: "2: gradients too",
    Stage.FULLY_SHARDED: "3: fully sharded",
}


def write_page(path: Path, plan: Plan, reasons: Explanation, measured: Measured | None) -> None:
    """Write the report as one HTML file, with all it needs inside (5 MB, most of it plotly).

    Raises:
        ConfigError: plotly or jinja2 is not installed.
    """
    try:
        import jinja2
        from plotly.offline import get_plotlyjs

        from ds_osdp.report.figures import STAGE_COLOURS, figures
    except ImportError as error:
        raise ConfigError(f"--html needs {error.name}: pip install 'ds-osdp[report]'") from error

    template = (resources.files("ds_osdp.report") / "page.html").read_text()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    drawn = {
        name: figure.to_html(
            full_html=False, include_plotlyjs=False, div_id=name, config={"responsive": True, "displayModeBar": False}
        )
        for name, figure in figures(plan, reasons, measured).items()
    }
    used = {unit.stage for unit in plan.units if unit.elements}
    page = environment.from_string(template).render(
        plan=plan,
        verdict=verdict(plan, reasons),
        sentences=[*summary(plan), *headline(plan, reasons)],
        figures=drawn,
        stages=[(_STAGE_NAMES[stage], STAGE_COLOURS[stage]) for stage in Stage if stage in used],
        units=_unit_rows(plan, reasons),
        rules=[(rule.match, format_seconds(rule.seconds)) for rule in reasons.rules],
        measured=_measured_rows(plan, measured) if measured else [],
        plotly=get_plotlyjs(),
    )
    write_whole(path, page)


def write_pictures(folder: Path, plan: Plan, reasons: Explanation, measured: Measured | None) -> list[Path]:
    """Write every figure as a PNG into ``folder``; returns the files.

    Raises:
        ConfigError: plotly or kaleido is not installed, or kaleido finds no browser to draw with.
    """
    try:
        import kaleido  # noqa: F401  (plotly draws with it, and says less clearly that it is missing)
        from plotly.io import write_images

        from ds_osdp.report.figures import figures
    except ImportError as error:
        raise ConfigError(f"--png needs {error.name}: pip install 'ds-osdp[report]'") from error
    folder.mkdir(parents=True, exist_ok=True)
    drawn = figures(plan, reasons, measured)
    for name, figure in drawn.items():
        figure.update_layout(paper_bgcolor="white", title={"text": name, "x": 0.01}, margin={"t": 70})
    files = [folder / f"{name}.png" for name in drawn]
    try:
        write_images(list(drawn.values()), files, width=1000, scale=2)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"--png draws with Chrome or Chromium: install it, or use --html ({reason})") from error
    return files


def _unit_rows(plan: Plan, reasons: Explanation) -> list[tuple[Any, ...]]:
    reason_of = {reason.name: reason for reason in reasons.units}
    rows = []
    for name, option, units in classes(plan.units, lambda unit: option_text(unit, plan.world_size)):
        spent = sum(reason_of[unit.name].bytes_spent for unit in units)
        saved = sum(reason_of[unit.name].seconds_saved for unit in units)
        bought = (format_bytes(spent), format_seconds(saved)) if spent > 0 else ("", "")
        rows.append((name, len(units), option, f"{sum(unit.elements for unit in units):,}", *bought))
    return rows


def _measured_rows(plan: Plan, measured: Measured) -> list[tuple[str, str, str, str]]:
    """What was predicted, what was measured (medians), and how far off."""

    def row(name: str, predicted: float, found: float, text: Any) -> tuple[str, str, str, str]:
        return name, text(predicted), text(found), f"{predicted / found - 1:+.1%}"

    rows = [row("seconds per step, median", plan.step_seconds, measured.median_seconds, format_seconds)]
    if measured.peak_bytes is not None:
        rows.append(row("peak bytes of a rank", plan.peak_bytes, measured.peak_bytes, format_bytes))
    return rows
