"""Seeing inside a node: its logs, its metrics, and the port where both health and metrics are read."""
