"""Split big parameters into slices that are gathered, used and freed in turn; the module stays what it was."""

from ds_osdp.split.modules import KEEP, Keeper, SlicedParameter, join, sliced, split, split_modules, split_rows, unsplit_name

__all__ = ["KEEP", "Keeper", "SlicedParameter", "join", "sliced", "split", "split_modules", "split_rows", "unsplit_name"]
