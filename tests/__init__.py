"""The tests. Helpers that assert are rewritten by pytest as tests are, so that their failures explain themselves."""

import pytest

pytest.register_assert_rewrite("tests.support", "tests.contracts", "tests.simulation")
