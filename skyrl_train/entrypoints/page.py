"""Look at runs in a browser: ``python -m skyrl_train.entrypoints.page [RUNS_DIR] [--port 7860] ...``.

The page only reads; it works for runs that train now, have ended, or come from another machine. An address other than this
machine's own needs a token: that of the environment variable SKYRL_PAGE_TOKEN, or one that is made and printed.

Exit codes: 0 stopped by SIGTERM or Ctrl-C; 2 no such folder, or the address is in use.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

import uvicorn
from rich.console import Console

from skyrl_train.endpoint.server.settings import is_loopback
from skyrl_train.errors import ConfigError
from skyrl_train.runtime.listening import bind

MODULE = "skyrl_train.entrypoints.page"
TOKEN_VARIABLE = "SKYRL_PAGE_TOKEN"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, serve the page until a signal, and return the exit code."""
    options = _parser().parse_args(argv)
    console = Console()
    if not options.runs_dir.is_dir():
        return _refuse(f"{options.runs_dir} is no folder. Name a folder of runs, or the folder of one run.")
    try:
        listener, url = bind(options.host, options.port)
    except ConfigError as error:
        return _refuse(f"{error}. Choose another --port; 0 takes a free one.")
    with listener:
        from skyrl_train.observability.page.app import create_page

        token = os.environ.get(TOKEN_VARIABLE) or (None if is_loopback(options.host) else secrets.token_urlsafe(24))
        shown = f"{url}/?token={token}" if token else f"{url}/"
        console.print(f"runs of {options.runs_dir} at {shown}", markup=False, highlight=False, soft_wrap=True)
        config = uvicorn.Config(
            create_page(options.runs_dir, token),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=1,  # streams to browsers never end by themselves
        )
        uvicorn.Server(config).run(sockets=[listener])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description="Shows runs in a browser: curves, samples, settings, and a comparison of runs.",
        epilog=f"For an address of other machines, {TOKEN_VARIABLE} sets the token; without it one is made and printed.",
    )
    add = parser.add_argument
    add("runs_dir", nargs="?", type=Path, default=Path("runs"), help="a folder of runs, or one run; default: runs")
    add("--host", default="127.0.0.1", help="the address to listen on; default: this machine only")
    add("--port", type=int, default=7860, help="0 takes a free one; default: 7860")
    return parser


def _refuse(text: str) -> int:
    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)
    return 2


if __name__ == "__main__":
    sys.exit(main())
