"""The root of the command line: its commands, its global options, and what happens to errors."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
import typer.core

from cloister import __version__
from cloister.cli import ask, bench, console, contexts, demo, doctor, gateway, protect, push, serve, unify
from cloister.errors import CloisterError

typer.core.HAS_RICH = False  # our help is plain; some versions of Typer would write "\\[required]" into it

INTERRUPTED = 130
HELP = """Private Mixture-of-Experts language models: protect a checkpoint, serve it anywhere, ask it privately.

\b
Examples:
  cloister demo                                    everything on this machine, in two minutes
  cloister protect MODEL OUT --base secret         make OUT/developer, OUT/server and OUT/client
  cloister serve OUT/server                        on the server
  cloister gateway OUT/client --server URL         on the user's machine: an OpenAI API and a chat page
  cloister ask OUT/client --server URL "Hello"     one question
"""
EPILOG = """\b
Exit codes:
  0    done
  1    failed, for a reason that nobody foresaw
  2    usage: the request cannot be, or an option is wrong
  3    bad data: a checkpoint, a directory or a tensor is not what it should be
  4    trust: wrong or expired key, no attestation, no access
  5    peer: the other side is not there, died or refused
  6    limit: too large, too busy, or the disk is full
  130  stopped with Ctrl-C; nothing half-written is left

\b
Every option can be set by an environment variable, shown in each command's help.
Every error code has an entry in docs/errors.md.
"""

LOOK: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 110}

app = typer.Typer(
    name="cloister",
    help=HELP,
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={
        "auto_envvar_prefix": "CLOISTER",
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
    },
)
for _module in (protect, serve, gateway, ask, doctor, contexts, push, bench, demo):
    app.command(
        name=_module.__name__.rsplit(".", 1)[-1],
        short_help=_module.SUMMARY,
        no_args_is_help=_module.NEEDS_ARGUMENTS,
        context_settings=LOOK,
    )(_module.command)
app.add_typer(unify.app, name="unify", short_help="One model of several owners' experts")


def _version(value: bool) -> None:
    if value:
        print(f"cloister {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, show_envvar=False, help="Print the version.")
    ] = False,
    verbose: console.Verbose = False,
    quiet: console.Quiet = False,
) -> None:
    """Global options; each is also understood after the command's name."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command; every error becomes a sentence and an exit code."""
    console.Settings.verbose = console.Settings.quiet = False
    command = typer.main.get_command(app)
    try:
        with _terminate_like_ctrl_c():
            result: Any = command.main(
                args=list(arguments) if arguments is not None else None, prog_name="cloister", standalone_mode=False
            )
        sys.stdout.flush()
        if result == INTERRUPTED:  # some versions of the option parser turn Ctrl-C into this
            console.fail("Stopped.")
        return result if isinstance(result, int) else 0
    except CloisterError as error:
        console.fail_with(error)
        return error.exit_code
    except KeyboardInterrupt:
        console.fail("Stopped.")
        return INTERRUPTED
    except BrokenPipeError:
        return _reader_left()
    except SystemExit as error:  # how the option parser ends on a broken pipe
        if isinstance(error.__context__, BrokenPipeError):
            return _reader_left()
        raise
    except Exception as error:
        return _other(error)


def _reader_left() -> int:
    """The reader of our output has seen enough, as `head` does. Python must not complain about it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


def _other(error: Exception) -> int:
    """Errors of the option parser, and those that nobody foresaw."""
    if type(error).__name__ == "Abort":  # Ctrl-C or the end of input at a question
        console.fail("Stopped.")
        return INTERRUPTED
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "cloister"
        if type(error).__name__.startswith("NoArgsIsHelp"):
            print(error.format_message(), file=sys.stderr)
        elif message := error.format_message():
            console.fail(message, f"`{path} --help` shows the options and examples.", "docs/errors.md#invalid_request")
        return 2
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("cloister"):
        console.fail(
            f"This needs the package {error.name!r}, which is not installed.",
            "Install what this command needs: pip install 'cloister[server,bench]'",
            "docs/errors.md#not_available",
        )
        return 2
    # The text of a foreign error may quote what was being worked on, so it is told only on request.
    console.fail(
        f"Cloister failed unexpectedly ({type(error).__name__}"
        + (f": {error})." if console.Settings.verbose else ")."),
        "Run it again with -v and report what it prints; leave out what is private.",
        "docs/errors.md#internal_error",
    )
    if console.Settings.verbose:
        console.frames(error)
    return 1


class _terminate_like_ctrl_c:
    """SIGTERM cleans up like Ctrl-C does, so that service managers leave nothing half-written either."""

    def __enter__(self) -> None:
        self._old: Any = None
        try:
            self._old = signal.signal(signal.SIGTERM, self._interrupt)
        except ValueError:  # not in the main thread: somebody embeds the command line
            self._old = None

    def __exit__(self, *_: object) -> None:
        if self._old is not None:
            signal.signal(signal.SIGTERM, self._old)

    @staticmethod
    def _interrupt(*_: object) -> None:
        raise KeyboardInterrupt
