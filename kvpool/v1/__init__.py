"""Generated from proto/kvpool/v1 by `make proto`; never edited."""
