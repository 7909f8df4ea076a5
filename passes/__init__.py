"""Passes: one transformation, analysis, search or lowering per file, grouped by kind."""

if __name__ != "acc.passes":
    raise ImportError("import `acc.passes`, not `passes`")
