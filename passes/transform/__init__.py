"""Transforms: they write new weights for the Arch that was chosen."""
