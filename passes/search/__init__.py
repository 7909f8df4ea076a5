"""Searches: they choose an Arch; they never touch weights."""
