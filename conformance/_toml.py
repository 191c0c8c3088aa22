"""``tomllib`` on every supported Python (3.10 has it as the ``tomli`` package)."""

import sys

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["tomllib"]
