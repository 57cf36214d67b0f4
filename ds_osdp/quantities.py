"""Byte sizes and durations, as people write and read them.  Everywhere else: ``int`` bytes, ``int`` nanoseconds."""

from __future__ import annotations

import re

from pydantic import ByteSize

__all__ = ["format_bytes", "format_seconds", "parse_bytes"]

_UNITS = ("B", "KB", "MB", "GB", "TB", "PB", "KiB", "MiB", "GiB", "TiB", "PiB")
_SIZE = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(_UNITS)})")
_POWERS = {unit: (1024 if "i" in unit else 1000) ** "BKMGTP".index(unit[0]) for unit in _UNITS}


def parse_bytes(value: int | str) -> int:
    """Bytes of a size such as ``14_000_000_000``, ``"14GiB"`` or ``"1.5 GB"``.

    Raises:
        ValueError: when the size is not positive, or is not written in one of the units above.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"a size is a number of bytes or text such as '14GiB', not {value!r}")
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is None:
            raise ValueError(
                f"{value!r} is not a size; write a number and one of {', '.join(_UNITS)}, such as '14GiB', "
                "with nothing around it"
            )
        number, unit = match.groups()
        value = int(float(number) * _POWERS[unit]) if "." in number else int(number) * _POWERS[unit]
    if value <= 0:
        raise ValueError(f"a size must be positive, not {value}")
    return value


def format_bytes(size: int) -> str:
    """``size`` bytes for people, in binary units: ``"1.5 GiB"``."""
    return ByteSize(size).human_readable(separator=" ")


def format_seconds(seconds: float) -> str:
    """``seconds`` for people, with three significant digits: ``"12.3 ms"``."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
