"""Errors that say what is wrong in numbers, and what to do next.

Every error of this package derives from :class:`OsdpError` and from the built-in it refines, so that
both ``except OsdpError`` and ``except ValueError`` do what a reader expects.
"""

from __future__ import annotations

from ds_osdp.quantities import format_bytes

__all__ = [
    "CalibrationError",
    "ClusterMismatchError",
    "ConfigError",
    "DocumentError",
    "InfeasiblePlanError",
    "OsdpError",
    "PlanMismatchError",
    "ProfileError",
    "RankMismatchError",
    "SeamError",
    "SolverError",
    "UnsupportedError",
]


class OsdpError(Exception):
    """Base of all errors raised by ds_osdp."""


class ConfigError(OsdpError, ValueError):
    """The DeepSpeed JSON or its ``osdp`` section says something that cannot be meant."""


class UnsupportedError(ConfigError):
    """The configuration asks for something that ds_osdp cannot combine with a plan yet."""


class DocumentError(OsdpError, ValueError):
    """A plan, profile or cluster file is not what it claims to be."""


class ClusterMismatchError(OsdpError, ValueError):
    """A cluster file does not describe the machines of this job."""


class CalibrationError(OsdpError, RuntimeError):
    """Links cannot be measured: a rank did not take part, or did not finish."""


class PlanMismatchError(OsdpError, ValueError):
    """A plan does not belong to this model, this world size, or what the engine partitioned."""


class RankMismatchError(OsdpError, RuntimeError):
    """Ranks disagree about something that must be equal on all of them."""


class ProfileError(OsdpError, RuntimeError):
    """A model cannot be profiled: it cannot tell its input, or its forward cannot be traced."""


class SeamError(OsdpError, RuntimeError):
    """DeepSpeed does not look the way the seams were written against."""


class SolverError(OsdpError, RuntimeError):
    """The solver stopped without an answer."""


class InfeasiblePlanError(OsdpError, ValueError):
    """No plan fits the budget.

    Attributes:
        budget_bytes: what was allowed per rank.
        least_bytes: the peak of the leanest plan; a budget of this size would do.
        moment: the moment of the step at which the leanest plan peaks, such as ``backward of 'lm_head'``.
        remedies: the smallest single changes that would fit, each with its numbers.
    """

    def __init__(self, budget_bytes: int, least_bytes: int, moment: str, remedies: tuple[str, ...] = ()) -> None:
        self.budget_bytes = budget_bytes
        self.least_bytes = least_bytes
        self.moment = moment
        self.remedies = remedies
        super().__init__(budget_bytes, least_bytes, moment, remedies)

    def __str__(self) -> str:
        ways = "; or ".join((f"raise osdp.memory_budget to {format_bytes(self.least_bytes)}", *self.remedies))
        return (
            f"the budget is {format_bytes(self.budget_bytes)} per rank; the leanest plan needs "
            f"{format_bytes(self.least_bytes)} ({self.least_bytes} bytes), at the {self.moment}. To make it fit: {ways}"
        )
