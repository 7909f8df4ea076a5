"""Lowerings: they write what an engine loads, and prove it."""
