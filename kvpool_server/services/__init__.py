"""The RPCs: decode -> pool -> encode. All meaning is in the pool, all translation in `kvpool.wire`.

Each RPC is the method of its name in one of four classes of handlers, which `PoolService` joins.

A handler raises `KVPoolError`s; `grpc_server` maps them to statuses and counts the calls. One event loop runs all
handlers, so a handler is atomic between two awaits. None holds the loop for long: counts and sizes are checked before
work that is proportional to them, and work on many blocks is done in steps (`turns.py`).
"""
