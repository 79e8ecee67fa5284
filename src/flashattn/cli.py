"""The command `flashattn`, also `python -m flashattn`: what is compiled, what is sound, and what a call would do.

Exit status: 0 fine, 1 a problem was found, 2 usage. With --json a command prints one JSON object.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from . import cli_cache, cli_doctor, cli_kernels, cli_warmup, settings
from ._version import __version__
from .cli_output import Report, Usage, parse_age, parse_size
from .cli_sources import parse_target_list
from .declared import PROFILES
from .jit import log

_USAGE = 2
_INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns the exit status; argparse leaves with 2 by itself."""
    args = _parser().parse_args(argv)
    _configure_log()
    try:
        report = args.run(args)
        text = report.shown(args.json)
        if text:
            print(text, flush=True)
        return report.status
    except Usage as error:
        print(f"flashattn: {error}", file=sys.stderr)
        return _USAGE
    except KeyboardInterrupt:
        print("flashattn: stopped; what was compiled is kept, the same command goes on from there", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough. Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _configure_log() -> None:
    """The reports say what the log would warn of, so the log is silent unless FLASHATTN_LOG_LEVEL is set."""
    log.configure(None)
    try:
        level = settings.get().log_level
    except ValueError:
        level = None
    logging.getLogger("flashattn").setLevel((level or "error").upper())


# ---- The arguments


def _kind(parse: Callable[[str], object], noun: str) -> Callable[[str], object]:
    """`parse` as argparse wants it: its ValueError becomes the message."""

    def parsed(text: str):
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    parsed.__name__ = noun
    return parsed


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not a number from 1 on")
    return int(text)


_COUNT = _kind(_at_least_one, "number")
_TARGETS = _kind(parse_target_list, "target")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flashattn", description=__doc__.split("\n\n", 1)[0], epilog=_epilog())
    parser.add_argument("--version", action="version", version=f"flashattn {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    _command(commands, "env", cli_doctor.env)
    _target(_command(commands, "doctor", cli_doctor.doctor), "look at these instead of the GPUs here")
    listing = _command(commands, "list", cli_kernels.list_declared)
    listing.add_argument("--profile", choices=PROFILES, default="core", help="which declared list (default: core)")
    _target(listing, "show each variant of these")
    _command(commands, "verify", cli_kernels.verify)
    _add_explain(commands)
    _add_cache(commands)
    _add_warmup(commands)
    return parser


def _epilog() -> str:
    return __doc__.strip().rpartition("\n\n")[2]


def _command(commands, name: str, run: Callable[[argparse.Namespace], Report]) -> argparse.ArgumentParser:
    """A command that is described by the first line of what it runs."""
    about = run.__doc__.splitlines()[0]
    parser = commands.add_parser(name, help=about, description=about)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)
    return parser


def _target(parser: argparse.ArgumentParser, about: str) -> None:
    parser.add_argument("--target", type=_TARGETS, metavar="NAME[,NAME]", help=f"{about}, such as sm_90 or gfx942")


def _add_explain(commands) -> None:
    parser = _command(commands, "explain", cli_kernels.explain)
    add = parser.add_argument
    add("--dtype", choices=tuple(cli_kernels.TORCH_DTYPES), required=True)
    add("--head-dim", type=_COUNT, required=True, metavar="N", help="of q and k")
    add("--head-dim-v", type=_COUNT, metavar="N", help="of v (default: that of q)")
    masks = parser.add_mutually_exclusive_group()
    masks.add_argument("--causal", action="store_true", help="queries see no key behind them")
    masks.add_argument("--window", action="store_true", help="queries see back only so far, whatever else")
    add("--tables", action="store_true", help="sequences are packed (cu_seqlens) or padded (seqused)")
    add("--generic", action="store_true", help="some pointer or stride is not a multiple of 16 bytes")
    _target(parser, "for these instead of the GPUs here")


def _add_cache(commands) -> None:
    about = "The kernels compiled on this machine."
    parser = commands.add_parser("cache", help=about, description=about)
    inner = parser.add_subparsers(metavar="command", required=True)
    _command(inner, "path", cli_cache.path)
    _command(inner, "list", cli_cache.list_entries)
    _command(inner, "verify", cli_cache.verify)
    _command(inner, "clear", cli_cache.clear)
    gc = _command(inner, "gc", cli_cache.gc)
    age, size = _kind(parse_age, "age"), _kind(parse_size, "size")
    gc.add_argument("--max-age", type=age, metavar="AGE", help="remove what was unused for longer: 30d, 12h")
    gc.add_argument("--max-size", type=size, metavar="SIZE", help="remove the longest unused beyond: 500MB, 1GiB")


def _add_warmup(commands) -> None:
    parser = _command(commands, "warmup", cli_warmup.warmup)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("file", nargs="?", type=Path, metavar="FILE", help="that FLASHATTN_RECORD wrote")
    what.add_argument("--profile", choices=PROFILES, help="a declared list")
    _target(parser, "for these instead of the GPUs here; with a FILE, only its kernels for these")
    parser.add_argument("--jobs", type=_COUNT, default=_processors(), metavar="N", help="processes (default: all)")
    about = "for one kernel; longer is a failure (default: 600)"
    parser.add_argument("--timeout", type=_COUNT, default=600, metavar="SECONDS", help=about)


def _processors() -> int:
    """Those that this process may use, where that is known."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
