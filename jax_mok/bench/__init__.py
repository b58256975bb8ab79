"""Measurements: `python -m jax_mok.bench <name> [flags]`."""
