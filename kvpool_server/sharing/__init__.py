"""How callers share what a server has. It knows neither the pool nor the network."""
