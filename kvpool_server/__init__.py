"""The kvpool server: an asyncio gRPC server around a synchronous pool."""
