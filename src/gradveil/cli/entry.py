"""The entry point: runs a command and turns whatever happens into one sentence and an exit code.

0 fine · 1 leak above the asked limit · 2 usage · 3 result not to be trusted · 4 internal · 130 stopped with Ctrl-C ·
141 the reader of the output has gone · 143 told to end (SIGTERM)
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence

import click

from gradveil.cli.app import app
from gradveil.errors import GradveilError

__all__ = ["main", "run_application"]

TRACEBACK = "GRADVEIL_TRACEBACK"
STOPPED = 130
UNHEARD = 141
TERMINATED = 143


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Args:
        arguments: Without the program's name; None takes those of the process.
    """
    return run_application(app, "gradveil", arguments)


def run_application(application: Callable[..., object], name: str, arguments: Sequence[str] | None = None) -> int:
    """Run any typer application as `main` runs ours; scripts beside the package answer in the same way."""
    try:
        with _ended_by_a_signal():
            code = application(args=arguments, prog_name=name, standalone_mode=False)
            sys.stdout.flush()
    except (BrokenPipeError, SystemExit):
        # The reader of our output has gone, as `head` does (typer turns that into an exit with 1, which has a meaning here);
        # Python would complain again while it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)
        return UNHEARD
    except (KeyboardInterrupt, click.Abort):
        code = STOPPED
    except _ToldToEnd:
        code = TERMINATED
    except Exception as error:
        return _answer(error)
    if code in (STOPPED, TERMINATED):
        _say("stopped; what is finished is kept, and the same command continues")
    return code if isinstance(code, int) else 0


class _ToldToEnd(BaseException):
    """SIGTERM came. No `KeyboardInterrupt`: where one passes through `exec`, Python ends with Ctrl-C's code all the same."""


@contextlib.contextmanager
def _ended_by_a_signal() -> Iterator[None]:
    """Let SIGTERM, which schedulers and containers send, end a run as Ctrl-C does: workers ended, locks let go, one sentence."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield  # somebody else decides what becomes of it
        return

    def end(*_: object) -> None:
        raise _ToldToEnd

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _answer(error: Exception) -> int:
    """Say in one sentence what went wrong, and return the exit code that stands for it."""
    if os.environ.get(TRACEBACK):
        traceback.print_exception(error)
    if isinstance(error, GradveilError):
        _say(f"error: {error}")
        return error.exit_code
    if isinstance(error, click.ClickException):
        _say(f"error: {_plain(error)}")
        return 2
    if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
        _say("error: there is not enough memory; lower records or batch sizes, or use --workers 1; finished cells are kept")
        return 2
    told = " ".join(str(error).split())[:300]
    _say(f"error: something failed inside gradveil ({type(error).__name__}: {told}); set {TRACEBACK}=1 to see where")
    return GradveilError.exit_code


def _plain(error: click.ClickException) -> str:
    """Return a complaint about the command line as a sentence, with the command to ask for help."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    command = context.command_path if context else "gradveil"
    # Both click and typer may offer the nearest command.
    message = re.sub(r"( Did you mean [^?]*\?)\1+", r"\1", error.format_message()).rstrip(".")
    return f"{message[:1].lower()}{message[1:]} (`{command} --help` tells more)"


def _say(text: str) -> None:
    click.echo(text, err=True)
