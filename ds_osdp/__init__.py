"""Optimal sharded data parallel for DeepSpeed ZeRO-3.

Add an ``osdp`` section to the DeepSpeed JSON and call :func:`initialize` where ``deepspeed.initialize`` stood, or
:func:`enable` before a framework calls it, or start the unchanged script with ``deepspeed --module ds_osdp.run``.

Importing this package patches nothing and loads neither deepspeed nor pyomo.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ds_osdp.errors import OsdpError
from ds_osdp.plan import Plan, Stage

if TYPE_CHECKING:
    from ds_osdp.deepspeed_seams import state_bytes
    from ds_osdp.entry import disable, enable, initialize

__all__ = ["OsdpError", "Plan", "Stage", "disable", "enable", "initialize", "state_bytes"]

# What loads deepspeed is loaded when it is first asked for.
_LAZY = {"disable": "entry", "enable": "entry", "initialize": "entry", "state_bytes": "deepspeed_seams"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"ds_osdp.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
