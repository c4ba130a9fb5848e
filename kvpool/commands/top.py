"""`kvpool top`: what a pool does now."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from kvpool.client.config import DEFAULT_ENDPOINT
from kvpool.commands import common
from kvpool.commands.common import Endpoint
from kvpool.commands.option_bounds import within
from kvpool.protocol.errors import InvalidRequestError, UnavailableError
from kvpool.report.output import console
from kvpool.top.frame import frame
from kvpool.top.screen import Watch, show


def top(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    interval: Annotated[
        float, typer.Option(callback=within(0.1, 3_600), help="Seconds between two frames, over which rates are taken.")
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame, with the rates of one interval, and end.")
    ] = False,
) -> None:
    """Show what the pool does now: hits, rates, latencies, memory, tiers, and who uses it. The key q ends it."""
    watch = Watch(endpoint, lambda: common.client_of(endpoint))
    try:
        if once:
            watch.look()
            time.sleep(interval)
            view = watch.look()
            if view.trouble:
                raise UnavailableError(view.trouble)
            console().print(frame(view))
        elif not sys.stdout.isatty():
            raise InvalidRequestError("kvpool top draws on a terminal; give --once to print one frame")
        else:
            show(watch, console(), interval)
    except KeyboardInterrupt:
        pass
    finally:
        watch.close()
