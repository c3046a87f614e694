"""Prints the file that swift's `--external_plugins` takes."""

from . import PLUGIN

print(PLUGIN)
