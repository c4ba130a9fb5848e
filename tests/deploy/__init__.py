"""The monitoring configuration that kvpool ships, with a real Prometheus."""
