"""MkDocs hooks: the parts of the reference that the code itself says, and the list of decisions."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ds_osdp.cli import make_parser
from ds_osdp.schema import config_schema

HERE = Path(__file__).resolve().parent


def on_config(config: Any) -> Any:
    """List the decisions, in their order."""
    pages = sorted(path.relative_to(HERE).as_posix() for path in (HERE / "decisions").glob("*.md"))
    config.nav[-1] = {"Decisions": pages}
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in what a page leaves to the code."""
    for marker, make in (("<!-- generated: config -->", config_reference), ("<!-- generated: cli -->", cli_reference)):
        if marker in markdown:
            markdown = markdown.replace(marker, make())
    return markdown


def config_reference() -> str:
    """A table for the section, and one for each object inside it."""
    schema = config_schema()
    parts = [_table(schema["properties"]["osdp"])]
    for name, definition in schema["$defs"].items():
        if "properties" in definition:
            parts.append(f"## {name}\n\n{_plain(definition.get('description', ''))}\n\n{_table(definition)}")
    return "\n\n".join(parts)


def cli_reference() -> str:
    """The help of every verb."""
    parser = make_parser()
    (verbs,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    helps = [f"```text\n{parser.format_help()}```"]
    helps += [f"## {name}\n\n```text\n{verb.format_help()}```" for name, verb in verbs.choices.items()]
    return "\n\n".join(helps)


def _table(definition: dict[str, Any]) -> str:
    rows = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    required = definition.get("required", [])
    for name, value in definition["properties"].items():
        given = value.get("default")
        default = "required" if name in required else "" if given is None else f"`{json.dumps(given)}`"
        rows.append(f"| `{name}` | {_type(value)} | {default} | {_plain(value.get('description', ''))} |")
    return "\n".join(rows)


def _type(value: dict[str, Any]) -> str:
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return name if name == "Stage" else f"[{name}](#{name.lower()})"
    if "anyOf" in value:
        return " or ".join(_type(option) for option in value["anyOf"] if option.get("type") != "null")
    if value.get("type") == "array":
        return f"list of {_type(value['items'])}" if "items" in value else "list"
    if isinstance(value.get("additionalProperties"), dict):
        return f"object of {_type(value['additionalProperties'])}"
    kinds = value.get("type", "any")
    return " or ".join(kind for kind in kinds if kind != "null") if isinstance(kinds, list) else kinds


def _plain(docstring: str) -> str:
    return " ".join(docstring.replace("``", "`").split()).replace("|", "\\|")
