"""Makes the pictures of the README: a terminal with svod-tune, and the top of a report.

    python docs/pictures/make.py            # tune.svg from tune.txt, report.png from the records that ship with svod (tune_db/)
    python docs/pictures/make.py --tune     # tunes ResNet-18 for two minutes: tune.txt and both pictures; on a quiet machine
    python docs/pictures/make.py --tune experiments/models/mlp.py --beam 8 --budget 30      # with arguments of svod-tune

rich draws the terminal as SVG; Chromium photographs the page of `svod-bench report`."""
from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TUNE = ["experiments/models/resnet18.py", "--beam", "8", "--budget", "120"]
WIDTH = 110         # columns of the terminal; longer lines are cut
PAGE = (1100, 1440)         # width and height of the report's picture, in pixels of the page
PROGRESS_LINES = 3          # lines of progress that the terminal shows
TABLE_LINES = 8             # kernels that its table shows
STYLES = ((r"(?<!–)\b\d+\.\d+×", "bold green"), (r"^(\$|kernel) .*", "bold"), (r"^next: .*", "cyan"), (r"^svod-tune: ", "dim"))


def shortened(lines: list[str]) -> list[str]:
    """The output of svod-tune with the first lines of progress and the first kernels of the table only."""
    progress = [k for k, line in enumerate(lines) if re.match(r"\[ *\d+ s\] ", line)]
    rule = next(k for k, line in enumerate(lines) if line.startswith("──"))
    end = next((k for k in range(rule, len(lines)) if not lines[k].strip()), len(lines))
    left_out = {*progress[PROGRESS_LINES:], *range(rule + 1 + TABLE_LINES, end)}
    marks = {k for k in left_out if k - 1 not in left_out}
    return ["…" if k in marks else line for k, line in enumerate(lines) if k in marks or k not in left_out]


def terminal(lines: list[str]) -> str:
    """A terminal with these lines, as SVG."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True, color_system="truecolor")
        for line in lines:
            text = Text(line)
            for pattern, style in STYLES:
                text.highlight_regex(pattern, style)
            console.print(text, no_wrap=True, overflow="ellipsis")
    svg = console.export_svg(title="svod-tune", unique_id="tune")
    return re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.S)      # fonts of another server


def svod(*arguments: str, folder: str) -> str:
    """Run a tool of svod's in a folder, with no variable of svod's set; its standard error. Raises SystemExit where it fails."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SVOD_", "BEAM"))}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    done = subprocess.run([sys.executable, "-m", "svod", *arguments], cwd=folder, text=True, env=environment, capture_output=True)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    return done.stderr


def photograph(folder: str, picture: Path) -> None:
    """The top of the report of the folder's tuning.db as PNG. Raises SystemExit where there is no Chromium."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        raise SystemExit(f"{picture.name} needs Chromium, which is not on the path")
    svod("bench", "report", "--db", "tuning.db", "-o", "report.html", folder=folder)
    subprocess.run([browser, "--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={PAGE[0]},{PAGE[1]}",
                    f"--screenshot={picture}", (Path(folder) / "report.html").as_uri()], check=True, capture_output=True)


def tune(arguments: list[str], folder: str) -> None:
    """Tune a model into the folder's tuning.db; write tune.txt."""
    script = str(ROOT / arguments[0])
    output = svod("tune", script, *arguments[1:], "--db", "tuning.db", folder=folder).replace(script, arguments[0])
    output = re.sub(r"SVOD_TUNE_DB=\S+ ", "", output.replace(f"{Path(sys.executable).parent}/", "")).replace(" --db tuning.db", "")
    lines = [" ".join(["$ svod-tune", *arguments]), *shortened(output.splitlines())]
    (HERE / "tune.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        if sys.argv[1:2] == ["--tune"]:
            tune(sys.argv[2:] or TUNE, folder)
        elif sys.argv[1:]:
            raise SystemExit(__doc__)
        else:
            for records in sorted((ROOT / "tune_db").glob("*.jsonl")):
                svod("db", "import", "--db", "tuning.db", str(records), folder=folder)
        lines = (HERE / "tune.txt").read_text(encoding="utf-8").splitlines()
        (HERE / "tune.svg").write_text(terminal(lines), encoding="utf-8")
        photograph(folder, HERE / "report.png")


if __name__ == "__main__":
    main()
