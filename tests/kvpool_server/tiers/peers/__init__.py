"""Tests of the tier of other servers."""
