"""Tests of kvpool_server.reports."""
