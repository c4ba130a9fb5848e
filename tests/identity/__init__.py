"""The identity oracle: any two engines with the same namespace compute the same KV."""
