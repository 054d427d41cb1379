"""Sweeps: many runs from one YAML."""
