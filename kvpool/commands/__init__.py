"""The commands of `kvpool`: one module each, which `kvpool.cli` registers."""
