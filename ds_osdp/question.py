"""What a plan was made from, kept inside the plan: so that a plan file alone can be explained, on any machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from ds_osdp.cluster import Cluster
from ds_osdp.config import OsdpConfig
from ds_osdp.errors import DocumentError
from ds_osdp.frozen import Document
from ds_osdp.job import Job
from ds_osdp.plan import Plan
from ds_osdp.profile import ModelProfile

__all__ = ["Question"]


class Question(Document):
    """Everything that made a plan but its budget, which the plan states itself."""

    FORMAT: ClassVar[str] = "ds_osdp.question"
    VERSION: ClassVar[int] = 1

    section: OsdpConfig
    job: Job
    cluster: Cluster
    profile: ModelProfile

    @classmethod
    def kept_in(
        cls, plan: Plan, section: OsdpConfig, job: Job, cluster: Cluster, profile_of: Callable[[Job], ModelProfile]
    ) -> Plan:
        """``plan`` with what it was made from inside; its micro-batch may be another than the one ``job`` began with."""
        job = job.model_copy(update={"micro_batch": plan.micro_batch, "accumulation": plan.accumulation})
        # The section's own names of files mean nothing elsewhere; the cluster stands beside it.
        section = section.model_copy(update={"cluster": None, "plan": None, "save_plan": None})
        question = cls(section=section, job=job, cluster=cluster, profile=profile_of(job)).to_dict()
        return plan.model_copy(update={"provenance": plan.provenance.model_copy(update={"question": question})})

    @classmethod
    def of(cls, plan: Plan, source: str) -> Question:
        """The question inside ``plan``.

        Raises:
            DocumentError: there is none, or another version of this package wrote it; ``source`` names the plan.
        """
        if plan.provenance.question is None:
            raise DocumentError(
                f"{source} does not hold what it was made from, so it cannot be explained: make it with "
                "'ds-osdp plan --output' or osdp.save_plan"
            )
        return cls.from_dict(plan.provenance.question, f"the question in {source}")
