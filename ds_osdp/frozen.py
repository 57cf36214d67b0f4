"""Frozen values and their versioned JSON form: the base of plans, profiles and clusters."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from ds_osdp.errors import DocumentError

__all__ = ["Document", "Frozen", "fingerprint", "one_line", "write_whole"]

DocumentT = TypeVar("DocumentT", bound="Document")


class Frozen(BaseModel):
    """A value: immutable, hashable, and with no key that was not asked for."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Document(Frozen):
    """A frozen value that is kept in a file; the file says what it is and in which version."""

    FORMAT: ClassVar[str]
    VERSION: ClassVar[int]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, as a dictionary that begins with ``format`` and ``version``."""
        return {"format": self.FORMAT, "version": self.VERSION, **self.model_dump(mode="json")}

    def to_json(self) -> str:
        """The JSON form, indented, with a last newline; equal values give equal text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON form to ``path``: completely, or (when that fails) not at all."""
        write_whole(Path(path), self.to_json())

    @classmethod
    def from_dict(cls: type[DocumentT], value: Any, source: str = "the document") -> DocumentT:
        """The value whose JSON form is ``value``.

        Raises:
            DocumentError: naming ``source`` and what is wrong with it.
        """
        if not isinstance(value, dict):
            raise DocumentError(f"{source} is not a JSON object")
        found, version = value.get("format"), value.get("version")
        if found != cls.FORMAT:
            raise DocumentError(f"{source} is no {cls.FORMAT} file: its 'format' is {found!r}")
        if version != cls.VERSION:
            raise DocumentError(
                f"{source} has version {version!r} of {cls.FORMAT}; this ds_osdp reads version {cls.VERSION}. Make it anew."
            )
        try:
            return cls.model_validate({k: v for k, v in value.items() if k not in ("format", "version")})
        except ValidationError as error:
            raise DocumentError(f"{source}: {one_line(error)}") from error

    @classmethod
    def load(cls: type[DocumentT], path: str | os.PathLike[str]) -> DocumentT:
        """The value kept in the file at ``path``.

        Raises:
            DocumentError: when there is no such file, or it holds something else.
        """
        try:
            value = json.loads(Path(path).read_text())
        except OSError as error:
            raise DocumentError(f"cannot read {os.fspath(path)}: {error.strerror}") from error
        except ValueError as error:
            raise DocumentError(f"{os.fspath(path)} is not JSON: {error}") from error
        return cls.from_dict(value, source=os.fspath(path))


def write_whole(target: Path, text: str) -> None:
    """Write ``text`` to ``target``: completely, or (when that fails) not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # A half-written plan would be read by every rank of the next job: write beside it, then rename.
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def fingerprint(value: Any) -> str:
    """A short stable hash of a JSON value, the same on every machine."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def one_line(error: ValidationError) -> str:
    """What pydantic found, as one line a person can act on."""
    return "; ".join(
        f"{'.'.join(str(part) for part in detail['loc']) or 'value'}: {detail['msg'].removeprefix('Value error, ')}"
        for detail in error.errors()
    )
