"""Read a DeepSpeed configuration in every form DeepSpeed takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

from ds_osdp.errors import ConfigError

__all__ = ["read_config"]


def read_config(args: Any, config: Any, config_params: Any) -> dict[str, Any]:
    """The configuration that ``deepspeed.initialize`` would use, as a dictionary.

    Args:
        args: the user's arguments, perhaps with a ``deepspeed_config``.
        config: a dictionary, a path, or base64 text.
        config_params: the same, under its old name.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    given = config if config is not None else config_params
    if given is None:
        given = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    if given is None:
        raise ConfigError("DeepSpeed needs a configuration: pass config=, or --deepspeed_config FILE in the arguments")
    if isinstance(given, Mapping):
        return dict(given)
    try:
        return dict(load_ds_config(str(given)))
    except ValueError as error:
        raise ConfigError(f"the DeepSpeed configuration {str(given)[:80]!r} cannot be read: {error}") from error
