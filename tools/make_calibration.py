"""Make acc/data/calibration.jsonl.gz and acc/data/SOURCES.md, the default calibration text that ships inside the wheel.

    python tools/make_calibration.py CORPUS_FOLDER [acc/data]

CORPUS_FOLDER holds {docs,general,code}-train.jsonl.gz with rows {"text", "source", "license"}; only these training
halves are read.

Which rows may be shipped. The licence must cover the *text* and let anybody pass it on, changed or not, sold or not:
  kept     PSF-2.0       Python documentation and standard library
  kept     CC-BY-SA-3.0  GNOME user help; Wikipedia passages of BoolQ
  kept     CC-BY-SA-4.0  Wikipedia passages of QuAC
  kept     GPL-2.0-or-later OR CC-BY-SA-3.0  Debian Handbook, taken under CC-BY-SA-3.0
  left out GPL-2.0-or-later alone (Debian Reference): its source and notice duties do not fit a data file of a wheel
  left out Apache-2.0, MIT, ODC-By of NarrativeQA, XSum and MultiLexSum: these are licences of the collections; the
           texts (novels and film scripts, BBC articles, court filings) belong to others
Documents are kept whole, so that notices inside them stay, and unchanged, as the share-alike licences ask to be told
of changes. The file is data under its own licences beside acc's code; SOURCES.md carries the attribution.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

CHARS = {"docs": 900_000, "general": 1_000_000, "code": 900_000}
"""Characters per set: thirds, so that English prose, technical English and code weigh alike."""
MOST_CHARS = 32_000
"""Longer documents would take the place of many others."""
KEPT = {
    "debian-handbook": (
        "CC-BY-SA-3.0",
        "The Debian Administrator's Handbook, Raphaël Hertzog and Roland Mas, debian-handbook.info",
    ),
    "gnome-user-docs": ("CC-BY-SA-3.0", "GNOME user help, the GNOME Documentation Project, help.gnome.org"),
    "python3.11-doc": ("PSF-2.0", "Python 3.11 documentation, (c) Python Software Foundation, docs.python.org/3.11"),
    "stdlib": ("PSF-2.0", "Python 3.11 standard library (without its tests), (c) Python Software Foundation"),
    "BoolQ": (
        "CC-BY-SA-3.0",
        "passages of the English Wikipedia from BoolQ (Clark et al., NAACL 2019), each with its article's title",
    ),
    "Quac": ("CC-BY-SA-4.0", "passages of the English Wikipedia from QuAC (Choi et al., EMNLP 2018)"),
}
SHARES = {
    "docs": {"debian-handbook": 1, "gnome-user-docs": 1, "python3.11-doc": 2},
    "general": {"BoolQ": 1, "Quac": 1},
    "code": {"stdlib": 1},
}
"""How the characters of a set are divided among its sources."""


def rows(path: Path, source: str) -> Iterator[dict[str, str]]:
    """The rows of one source that may be shipped, in the order of a hash of their names."""
    found = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            name, _, rest = row["source"].partition("/")
            licences = row["license"].split(" OR ")
            if name != source or KEPT[source][0] not in licences or len(row["text"]) > MOST_CHARS:
                continue
            if source == "stdlib" and rest.split("/")[0] in ("test", "pydoc_data", "encodings"):
                continue  # tests, and tables rather than code
            found.append({"text": row["text"], "source": row["source"], "license": KEPT[source][0]})
    yield from sorted(found, key=lambda row: hashlib.sha256(row["source"].encode()).digest())


def chosen(corpus: Path) -> Iterator[dict[str, str]]:
    """The rows to ship."""
    for kind, shares in SHARES.items():
        for source, share in shares.items():
            left = CHARS[kind] * share // sum(shares.values())
            for row in rows(corpus / f"{kind}-train.jsonl.gz", source):
                if left <= 0:
                    break
                left -= len(row["text"])
                yield row


def main(corpus: Path, out: Path) -> None:
    """Write both files."""
    out.mkdir(parents=True, exist_ok=True)
    picked = sorted(chosen(corpus), key=lambda row: hashlib.sha256(row["text"].encode()).digest())
    text = "".join(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n" for row in picked)
    # No time stamp and no file name inside, so that the same input gives the same bytes.
    (out / "calibration.jsonl.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    documents, chars = Counter[str](), Counter[str]()
    for row in picked:
        name = row["source"].split("/")[0]
        documents[name] += 1
        chars[name] += len(row["text"])
    table = [
        f"| {KEPT[name][1]} | {KEPT[name][0]} | {documents[name]} | {chars[name]:,} |"
        for name in KEPT
        if documents[name]
    ]
    (out / "SOURCES.md").write_text(SOURCES.format(table="\n".join(table)), encoding="utf-8")
    size = (out / "calibration.jsonl.gz").stat().st_size
    print(f"{len(picked)} documents, {sum(chars.values()):,} characters, {size:,} bytes compressed")


SOURCES = """# The default calibration text

`calibration.jsonl.gz`, made by `tools/make_calibration.py`; rows `{{"text", "source", "license"}}`. The texts are not
part of acc's code: each stays under its own licence, named in its row. They were extracted as plain text and are
otherwise unchanged.

| source | licence | documents | characters |
| --- | --- | --- | --- |
{table}

Licences: [PSF-2.0](https://docs.python.org/3.11/license.html),
[CC-BY-SA-3.0](https://creativecommons.org/licenses/by-sa/3.0/), [CC-BY-SA-4.0](https://creativecommons.org/licenses/by-sa/4.0/).
The Debian Handbook is offered under GPL-2.0-or-later or CC-BY-SA-3.0 and taken under the latter.
"""

if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) == 3 else "acc/data"))
