"""Plans and their reasons for people: tables on a terminal, and one page of figures."""

from ds_osdp.report.tables import (
    alternatives_renderable,
    difference_renderable,
    explanation_renderable,
    plan_renderable,
    plan_text,
    sizes_renderable,
)
from ds_osdp.report.words import moved_units

__all__ = [
    "alternatives_renderable",
    "difference_renderable",
    "explanation_renderable",
    "moved_units",
    "plan_renderable",
    "plan_text",
    "sizes_renderable",
]
