"""A child process of tests: `python -m tests.support.child`."""

from __future__ import annotations

import time

from kvpool.transport.child_process import exit_with_parent, receive_settings, wait_for_parent_end

if __name__ == "__main__":
    settings = receive_settings()
    if settings["ends"] == "whatever runs":
        exit_with_parent()
    print(settings["key"], flush=True)
    if settings["ends"] == "by its main thread":
        wait_for_parent_end()
    else:
        time.sleep(60)
