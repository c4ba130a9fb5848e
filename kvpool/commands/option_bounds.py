"""Bounds of numeric options on the command line; typer's own `min` and `max` do not say which value was given."""

from __future__ import annotations

from collections.abc import Callable

import typer


def within(least: float, most: float | None = None, instead: str = "") -> Callable[[float | None], float | None]:
    """A callback of `typer.Option` that refuses what is out of bounds, and names `instead`, such as "or --end"."""

    def check(value: float | None) -> float | None:
        if value is None or (least <= value and (most is None or value <= most)):
            return value
        bounds = f"{least:,} or more" if most is None else f"{least:,} to {most:,}"
        raise typer.BadParameter(f"{value} is out of bounds; give {bounds}{instead and f', {instead}'}")

    return check
