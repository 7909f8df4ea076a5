"""Devices, engines, workloads and named targets that ship with acc: the TOML files of this folder, data and no code."""
