"""The JSON Schema of a DeepSpeed JSON with an ``osdp`` section, for editors: ``python -m ds_osdp.schema`` prints it."""

from __future__ import annotations

import json
import sys
from typing import Any

from ds_osdp.config import SECTION, OsdpConfig

__all__ = ["config_schema"]


def config_schema() -> dict[str, Any]:
    """What the ``osdp`` section may hold; everything else in the JSON is DeepSpeed's."""
    section = OsdpConfig.model_json_schema(ref_template="#/$defs/{model}")
    definitions = section.pop("$defs")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"DeepSpeed configuration with an {SECTION!r} section",
        "type": "object",
        "properties": {SECTION: section},
        "$defs": definitions,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(config_schema(), indent=2) + "\n")
