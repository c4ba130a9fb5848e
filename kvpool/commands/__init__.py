"""The commands of `kvpool`, one module each.

gRPC reads GRPC_VERBOSITY when it is imported, which the commands do: its own lines about a failed handshake would stand
before the sentence with which a command explains the failure.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
