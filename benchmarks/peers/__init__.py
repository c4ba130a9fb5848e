"""The systems that kvpool is compared with."""
