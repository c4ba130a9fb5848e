"""The long description: README.md, whose links lead to the repository, because the package index has no other files."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent


def long_description() -> str:
    """README.md with absolute links."""
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    files = f"{project['urls']['Source']}/blob/main"
    return re.sub(r"\]\((?![a-z]+:|#)([^)]+)\)", rf"]({files}/\1)", (HERE / "README.md").read_text(encoding="utf-8"))


setup(long_description=long_description(), long_description_content_type="text/markdown")
