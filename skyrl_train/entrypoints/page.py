"""``skyrl-train page``: runs in a browser. It only reads; runs that train now, have ended, or were copied here look alike."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

if TYPE_CHECKING:
    from uvicorn import Server

TOKEN_VARIABLE = "SKYRL_PAGE_TOKEN"
DEFAULT_PORT = 7860


def page(
    runs_dir: Annotated[Path, typer.Argument(help="A folder of runs, or one run.")] = Path("runs"),
    host: Annotated[
        str, typer.Option(help="The address to listen on; the default is this machine only.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = DEFAULT_PORT,
) -> int:
    """Show runs in a browser: curves, timeline, samples, settings, and a comparison of runs.

    An address of other machines needs a token: the one in SKYRL_PAGE_TOKEN, or else one that is made and printed.
    """
    from rich.console import Console

    from skyrl_train.endpoint.server.settings import is_loopback
    from skyrl_train.observability.readers.folders import no_such_run
    from skyrl_train.runtime.listening import bind

    if not runs_dir.is_dir():
        raise no_such_run(runs_dir.resolve())
    listener, url = bind(host, port, "--port")
    with listener:
        token = os.environ.get(TOKEN_VARIABLE) or (None if is_loopback(host) else secrets.token_urlsafe(24))
        text = f"page of {runs_dir} at {address(url, token)}"
        Console().print(text, markup=False, highlight=False, soft_wrap=True)
        page_server(runs_dir, token).run(sockets=[listener])
    return 0


def address(url: str, token: str | None) -> str:
    """Return the address that a browser opens first."""
    return f"{url}/?token={quote(token, safe='')}" if token else f"{url}/"


def page_server(root: Path, token: str | None) -> Server:
    """Return the server of the page of a folder of runs, or of one run; see :func:`create_page` for ``token``."""
    import uvicorn

    from skyrl_train.observability.page.app import create_page

    config = uvicorn.Config(
        create_page(root, token),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=1,  # streams to browsers never end by themselves
    )
    return uvicorn.Server(config)
