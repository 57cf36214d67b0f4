"""``python -m ds_osdp``: the command line."""

import sys

from ds_osdp.cli import main

if __name__ == "__main__":
    sys.exit(main())
