"""Measuring, reporting and plotting, shared by all cases."""
