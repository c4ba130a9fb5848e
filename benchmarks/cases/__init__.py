"""What is measured, one file a case: `python -m benchmarks.cases.NAME`."""
