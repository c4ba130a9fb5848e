"""The commands of `kvpool`.

gRPC reads GRPC_VERBOSITY when it is imported: its own lines about a failed handshake would stand before the sentence
with which a command explains the failure. The variable is as it was afterwards, for processes that are started later.
"""

import os

_IS_SET = "GRPC_VERBOSITY" in os.environ
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc  # noqa: E402, F401

if not _IS_SET:
    del os.environ["GRPC_VERBOSITY"]
