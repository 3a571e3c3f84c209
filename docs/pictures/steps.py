"""Takes the picture of docs/debugging.md: the loops of a product of matrices, before and after opts.

    python docs/pictures/steps.py [chromium]        writes docs/pictures/steps.png
"""
from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import svod
from svod import Tensor
from svod.steps.page import render_kernel
from svod.steps.plan_steps import KernelPart

CHAIN = "UPCAST(o0, 4) UPCAST(o1, 24) THREAD(o1, 2)"
SHOWN = slice(2, 5)         # steps: the three opts
PIXELS = 1180, 1160
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--hide-scrollbars",
           "--force-prefers-reduced-motion")


def main(chromium: str = "chromium") -> None:
    a, b = (Tensor(np.zeros(shape, np.float32)) for shape in ((64, 128), (128, 96)))
    part = svod.kernel(a @ b, chain=CHAIN).steps().part
    page = render_kernel(KernelPart(part.id, part.name, (), part.steps[SHOWN]))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "steps.html"
        file.write_text(page)
        subprocess.run([chromium, *OPTIONS, f"--user-data-dir={folder}/profile", f"--window-size={PIXELS[0]},{PIXELS[1]}",
                        f"--screenshot={Path(__file__).with_suffix('.png')}", file.as_uri()], check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main(*sys.argv[1:])
