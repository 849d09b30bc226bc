"""The command line: one thin file per command, assembled in `gradveil.cli.app`. Heavy modules are imported inside commands."""

import importlib
import warnings

with warnings.catch_warnings():
    # typer 0.20 imports names that click 8.5 calls deprecated: nothing a user can act on, and an error under -W error.
    warnings.simplefilter("ignore", DeprecationWarning)
    importlib.import_module("typer")

from gradveil.cli.entry import main

__all__ = ["main"]
