"""Make `backends/llamacpp/utilisation.json`: the share of the data sheet that llama.cpp reached, per class of work.

    python tools/measure_utilisation.py MODEL --target cpu-llamacpp TABLE...

TABLE are cost tables that `acc profile MODEL --target ... --export` wrote on the device of the target, one per number
format. Estimates for devices that are not here divide their roofline by these shares.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path

from acc import targetfiles
from acc.backends.llamacpp.cost import KINDS, fit_table, roofline
from acc.backends.llamacpp.work import Family
from acc.cost import CostTable
from acc.parent import open_parent
from acc.store import Store

OUT = Path(__file__).parent.parent / "backends" / "llamacpp" / "utilisation.json"


def main() -> None:
    """Read the tables and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--target", default="cpu-llamacpp")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder)) as store:
        family = Family(open_parent(given.model, store).ir)
        target = targetfiles.load(given.target, cache_file=store.root / "machine.json")
    found: dict[str, object] = {}
    provenance = None
    for path in given.tables:
        table = CostTable.load(path)
        provenance = table.provenance
        for quant in table.formats():
            # Large models are what other devices are estimated for: nothing of them stays in caches.
            rates, _ = fit_table(table, family, replace(target, quant=quant), caches=(math.inf,))
            best = roofline(target.device)
            found[quant] = {
                kind: {
                    name: float(f"{best(name) / seconds:.3g}")
                    for name, seconds in rates[kind].seconds.items()
                    if seconds > 0
                }
                for kind in KINDS
            }
    assert provenance is not None
    device = target.device
    told = {
        "kind": device.kind,
        "date": provenance.date,
        "engine_version": provenance.engine_version,
        "model": Path(given.model).stem,
        "bandwidth": device.bandwidth,
        "flops": dict(device.flops),
        "formats": found,
    }
    known = json.loads(OUT.read_text("utf-8")) if OUT.exists() else {"devices": {}}
    known["devices"][device.name] = told
    OUT.write_text(json.dumps(known, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
