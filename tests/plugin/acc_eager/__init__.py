"""An example plug-in of acc: one pass, one backend, one target file."""
