"""Backends: one serving engine per folder."""

if __name__ != "acc.backends":
    raise ImportError("import `acc.backends`, not `backends`")
