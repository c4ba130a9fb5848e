"""How engines run in tests that make them fail: one torch thread, and no log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_engine() -> Iterator[None]:
    """One torch thread, and no log, because faults are simulated."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
    torch.set_num_threads(threads)
