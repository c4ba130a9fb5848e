"""Writes the pictures in docs/images: `python -m tests.support.screenshots [--minutes 14]`.

A server with a tier and a quota is driven for so long; then Chromium opens its page in light, dark, and as narrow
as a phone, and commands run each on a terminal of its own, whose output rich draws.
"""

from __future__ import annotations

import argparse
import io
import os
import pty
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from fcntl import ioctl
from io import StringIO
from pathlib import Path
from termios import TIOCSWINSZ

from PIL import Image
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text
from selenium.webdriver.chrome.webdriver import WebDriver

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from tests.support.browser import set_screen, start_browser
from tests.support.driven_pool import Driver
from tests.support.processes import ServerProcess, clean_environment, wait_for

IMAGES = Path(__file__).parents[2] / "docs" / "images"
MAX_BYTES = 150 << 10
COLOURS = 128
"""Of a screenshot: a third of the bytes of one with all colours."""
DIRECTORY = Path("/tmp/kvpool-demo")
"""Of the tier, whose name the page shows."""
SHOTS = {"light": (1_280, False), "dark": (1_280, True), "phone": (360, False)}
"""By name: the width, and whether the system is dark."""
MAX_HEIGHT = {"light": 2_200, "dark": 1_000, "phone": 1_500}
REPORT_EVERY_S = 10.0
COLUMNS = 100
TERMINALS = {"stats": ("stats",), "top": ("top", "--once"), "doctor": ("doctor",)}
"""Name of the picture -> arguments of `kvpool`."""
MAX_LINES = 30
PORTS = (":50051", ":50052", ":50053")
"""The default ports, which the pictures show in place of the server's own."""


def drivers_of(client: Client) -> list[Driver]:
    """Three engines of two models and two tenants."""
    return [
        Driver(client, "Qwen/Qwen3-32B", "acme", num_chats=10, seed=1),
        Driver(client, "meta-llama/Llama-3.1-70B-Instruct", "umbrella", num_chats=24, seed=2),
        Driver(client, "Qwen/Qwen3-32B", "umbrella", num_chats=4, seed=3),
    ]


def drive(drivers: Sequence[Driver], seconds: float) -> None:
    """The engines' requests for so long; the load comes and goes."""
    began, reported, chance = time.monotonic(), 0.0, random.Random(4)
    while (now := time.monotonic()) < began + seconds:
        for nth, driver in enumerate(drivers):
            if chance.random() < (1.0, 0.6, 0.3)[nth]:
                driver.turn()
        if now >= reported + REPORT_EVERY_S:
            reported = now
            for nth, driver in enumerate(drivers):
                driver.report(f"gpu-{nth + 1}:41{nth}7")
        is_busy = (now - began) % 300 < 180
        time.sleep(chance.uniform(0.02, 0.12) * (1 if is_busy else 4))


def shoot(browser: WebDriver, url: str, name: str) -> Path | None:
    """Writes one screenshot; none while the page shows a warning, as of a machine that is busy otherwise."""
    width, is_dark = SHOTS[name]
    set_screen(browser, width, 900, dark=is_dark)
    browser.get(url)
    wait_for(lambda: browser.execute_script("return document.querySelector('#about').textContent"), "the page")
    shown = "return document.querySelector('#chart-lookups [role=img]').ariaLabel.includes('now')"
    wait_for(lambda: browser.execute_script(shown), "the charts")
    if browser.execute_script("return document.querySelector('#state').dataset.level") != "ok":
        return None
    height = browser.execute_script("return document.documentElement.scrollHeight")
    set_screen(browser, width, min(height, MAX_HEIGHT[name]), dark=is_dark)
    time.sleep(1)  # The charts fit themselves to the screen.
    path = IMAGES / f"page-{name}.png"
    image = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    assert path.stat().st_size <= MAX_BYTES, f"{path} has {path.stat().st_size:,} bytes, not {MAX_BYTES:,} at most"
    return path


def on_a_terminal(command: list[str], environment: dict[str, str]) -> str:
    """What a command prints on a terminal, with its escape sequences."""
    leader, follower = pty.openpty()
    ioctl(follower, TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    with subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=environment) as process:
        os.close(follower)
        printed = b""
        while True:
            try:
                chunk = os.read(leader, 65_536)
            except OSError:  # The command has closed its terminal.
                break
            if not chunk:
                break
            printed += chunk
        process.wait(30)
    os.close(leader)
    return printed.decode().replace("\r\n", "\n")


def svg(name: str, line: str, printed: str) -> str:
    """The picture of a terminal; it asks no other host for fonts."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    shown = printed.rstrip().splitlines()[:MAX_LINES]
    console.print(Text.from_ansi("\n".join([f"\x1b[1m$ {line}\x1b[0m", *shown])))
    plain = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    text = console.export_svg(title="", code_format=plain, unique_id=f"terminal-{name}")
    return "\n".join(each.rstrip() for each in text.splitlines()) + "\n"


def draw(server: ServerProcess, name: str, arguments: tuple[str, ...]) -> Path:
    """Writes the picture of what a command prints."""
    environment = clean_environment(KVPOOL_ENDPOINT=server.endpoint, TERM="xterm-256color")
    printed = on_a_terminal([sys.executable, "-m", "kvpool.cli", *arguments], environment)
    for ours, port in zip((server.endpoint, server.http_url.partition("://")[2]), PORTS, strict=False):
        printed = printed.replace(ours.split("/")[0], f"127.0.0.1{port}")
    path = IMAGES / f"terminal-{name}.svg"
    path.write_text(svg(name, " ".join(["kvpool", *arguments]), printed))
    return path


def main() -> None:
    """Drives a server and writes all pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=14.0)
    minutes = parser.parse_args().minutes
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kv-") as directory:
        DIRECTORY.mkdir()
        tier = f"file:{DIRECTORY},size=256MiB"
        flags = ("--memory", "48MiB", "--tier", tier, "--quota", "tenant:acme=24MiB")
        server = ServerProcess(Path(directory), *flags, is_executed=True)
        browser = None
        try:
            with Client(ClientConfig(server.endpoint, timeout_ms=30_000)) as client:
                drivers = drivers_of(client)
                drive(drivers, minutes * 60)
                browser = start_browser(f"{directory}/chromium")
                for name in SHOTS:
                    while (shot := shoot(browser, f"{server.http_url}/", name)) is None:
                        drive(drivers, REPORT_EVERY_S)
                    print(shot)
                for name, arguments in TERMINALS.items():
                    print(draw(server, name, arguments))
        finally:
            if browser is not None:
                browser.quit()
            server.stop()
            shutil.rmtree(DIRECTORY)


if __name__ == "__main__":
    main()
