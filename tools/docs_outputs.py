"""Run the commands that the documentation shows, on SmolLM2, keep what they print, and put it into the pages.

    python tools/docs_outputs.py             run everything (about 20 minutes on 2 cores), then refresh the pages
    python tools/docs_outputs.py inspect ls  run some of it
    python tools/docs_outputs.py --refresh   only put docs/results/*.txt into the pages

A page shows a result by a comment and the block after it, `<!-- result: inspect.txt 1-12 -->` (lines, optional).
Paths of this machine are shortened in what is kept, and of very long output the beginning is kept; both can be seen.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from demo_model import demo_model

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MODEL = "SmolLM2-135M-Instruct.gguf"
LONG = 250
"""Lines that are kept of one output."""

COMMANDS = {
    "doctor": "acc doctor",
    "ls": "acc ls targets",
    "passes": "acc ls passes",
    "inspect": f"acc inspect {MODEL}",
    "check": f"acc check {MODEL} --target cpu-llamacpp",
    "explain": "acc explain LC010",
    "compile": f"acc compile {MODEL} --target cpu-llamacpp --effort quick --tpot 0.7x --memory 0.8x -o out",
    "bench": "acc bench out",
    "run": "acc run out 'Name three colours of the rainbow.'",
    "opt": f"acc opt {MODEL} -p 'calibrate{{tokens=4096}},order,uniform{{ffn=1024}},slice,refit'",
    "validate": f"acc profile {MODEL} --target cpu-llamacpp --validate",
    "elsewhere": f"acc compile {MODEL} --target rtx5070-llamacpp --effort quick --tpot 0.7x -o elsewhere",
}
_BLOCK = re.compile(
    r"(?P<head><!-- result: (?P<file>\S+)(?: (?P<first>\d+)-(?P<last>\d+))? -->\n```text\n).*?(?P<foot>```\n)", re.S
)


def run(name: str, folder: Path) -> int:
    """Run one command in `folder`; both streams, in the order a terminal shows them, go to docs/results/NAME.txt."""
    command = COMMANDS[name]
    words = [str(Path(sys.executable).parent / "acc"), *shlex.split(command)[1:]]
    environment = {**os.environ, "COLUMNS": "118", "NO_COLOR": "1"}
    ran = subprocess.run(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    told = ran.stdout.replace(str(folder), "…").replace(sys.prefix, ".venv").replace(str(Path.home()), "~")
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    foot = f"# exit code {ran.returncode}; {day}, {machine}"
    lines = [line.rstrip() for line in told.strip("\n").splitlines()]
    kept = lines[:LONG] + [f"[{len(lines) - LONG} more lines]"] * (len(lines) > LONG)
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.txt").write_text("\n".join([f"$ {command}", *kept, "", foot]) + "\n", "utf-8")
    print(f"{name}: exit code {ran.returncode}, {len(lines)} lines")
    return ran.returncode


def refreshed(page: str) -> str:
    """A page with every result block as the results are now."""

    def block(match: re.Match[str]) -> str:
        if not (RESULTS / match["file"]).exists():
            return match[0]
        lines = (RESULTS / match["file"]).read_text("utf-8").splitlines()
        if match["first"]:
            lines = lines[int(match["first"]) - 1 : int(match["last"])]
        return match["head"] + "\n".join(lines) + "\n" + match["foot"]

    return _BLOCK.sub(block, page)


def picture(report: Path, image: Path) -> None:
    """The top of a report as a picture, by headless Chromium."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("no Chromium on this machine: the picture of the report is not made anew")
    with tempfile.TemporaryDirectory() as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        options += ["--hide-scrollbars", "--window-size=1100,1620", f"--user-data-dir={profile}"]
        image.parent.mkdir(parents=True, exist_ok=True)
        command = [browser, *options, f"--screenshot={image}", report.absolute().as_uri()]
        subprocess.run(command, check=True, capture_output=True)


def main() -> int:
    """Run, draw, refresh."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*COMMANDS, []], help="which commands; all by default")
    parser.add_argument("--refresh", action="store_true", help="run nothing")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "docs", help="where to run; kept between runs")
    given = parser.parse_args()
    failed = []
    if not given.refresh:
        given.folder.mkdir(parents=True, exist_ok=True)
        link = given.folder / MODEL
        link.unlink(missing_ok=True)
        link.symlink_to(demo_model())
        failed = [name for name in given.names or COMMANDS if run(name, given.folder.absolute())]
        if (given.folder / "out" / "report.html").exists():
            picture(given.folder / "out" / "report.html", ROOT / "docs" / "img" / "report.png")
    for page in PAGES:
        page.write_text(refreshed(page.read_text("utf-8")), "utf-8")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
