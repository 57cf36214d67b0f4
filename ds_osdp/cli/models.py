"""``--model``: a model without weights, from a Hugging Face configuration or from the user's own code."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ds_osdp.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["build_model"]


def build_model(name: str) -> nn.Module:
    """The model that ``--model`` names, on the meta device.

    Raises:
        ConfigError: there is no such model, or it is no model.
    """
    import torch

    kind, _, rest = name.partition(":")
    with torch.device("meta"):
        if kind == "hf" and rest:
            return _build_hugging_face(Path(rest))
        if kind == "py" and ":" in rest:
            return _call_user_code(rest)
    raise ConfigError(f"--model {name!r}: write hf:PATH_TO_CONFIG_JSON or py:MODULE:CALLABLE")


def _build_hugging_face(path: Path) -> nn.Module:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("--model hf: needs Hugging Face transformers: pip install 'ds-osdp[hf]'") from error
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text())
        config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{file} is no Hugging Face model configuration: {error!r}") from error
    for architecture in config.architectures or ():
        if hasattr(transformers, architecture):
            model: nn.Module = getattr(transformers, architecture)(config)
            return model
    return transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]


def _call_user_code(name: str) -> nn.Module:
    module_name, _, attribute = name.partition(":")
    sys.path.insert(0, ".")
    try:
        model = getattr(importlib.import_module(module_name), attribute)()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--model py:{name}: {error}") from error
    from torch import nn

    if not isinstance(model, nn.Module):
        raise ConfigError(f"--model py:{name} returns {type(model).__name__}, not a torch.nn.Module")
    return model
