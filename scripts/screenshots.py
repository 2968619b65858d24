"""The pictures in docs/images: `python scripts/screenshots.py docs/images --pictures FOLDER`.

in: class folders of pictures that may be shown to anyone, examples/digits.zip  ->  out: PNGs of a contact sheet, of browse.py, of a run
Invariant: what they show is real: shards made, a model trained, pages served, on this machine, by the programs of this repo.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # `python scripts/screenshots.py` puts scripts/ there, not the root

from engine.flags import Parser, integer  # noqa: E402
from scripts import browse  # noqa: E402

EXAMPLES = """examples:
  python scripts/screenshots.py docs/images --pictures photos/

Needs Chromium with its driver (Debian: chromium, chromium-driver) and selenium. Trains a minute on the CPU."""

LAPTOP, PHONE = (1280, 800), (390, 844)
CHROMIUM, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
# Headless, and quiet: it must not call anyone, nor show hints of a first start.
ARGUMENTS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip


def open_chromium(size: tuple[int, int] = LAPTOP) -> Any:
    """A headless browser; `quit()` it."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for argument in ARGUMENTS:
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    resize(driver, size)
    return driver


def resize(driver: Any, size: tuple[int, int]) -> None:
    """Give the page this width and height, and a narrow one a phone's way of laying it out."""
    width, height = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def shoot(driver: Any, url: str, out: Path) -> None:
    """Write a screenshot of a page whose pictures are all there, with few colours: it is for a README."""
    driver.get(url)
    script = "return [...document.images].filter(i => i.getBoundingClientRect().top < innerHeight).every(i => i.complete)"
    end = time.monotonic() + 30
    while not driver.execute_script(script) and time.monotonic() < end:
        time.sleep(0.1)
    driver.save_screenshot(str(out))
    Image.open(out).convert("RGB").quantize(128).save(out, optimize=True)


def python(*words: object) -> None:
    """Run a program of this repo; its output is shown where it fails."""
    done = subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"screenshots.py: error: {words[0]} failed: {(done.stdout + done.stderr)[-1000:]}")


def make(out: Path, pictures: Path, epochs: int) -> None:
    """Write all pictures."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        python("scripts/make_shards.py", pictures, base / "photos", "--num-shards", 3)
        python("scripts/make_shards.py", "examples/digits.zip", base / "digits", "--split", "train=0.8,val=0.2", "--num-shards", 10)
        python(
            "run.py", "--data", base / "digits/train", "--val-data", base / "digits/val", "-c", "recipes/digits.yaml", "--epochs", epochs,
            "--device", "cpu", "--nproc-per-node", 2, "--name", "digits", "--output", base / "runs", "--log-interval", 5,
        )  # fmt: skip
        sheet = out / "contact_sheet.png"
        python("scripts/contact_sheet.py", base / "photos", sheet, "--num", 16, "--columns", 8, "--side", 112)
        Image.open(sheet).quantize(128).save(sheet, optimize=True)
        server = browse.start(
            patterns=[str(base / "photos")], runs=base / "runs", port=0, task="image-classification", label="cls", img_size=None, seed=0,
            decode=False, workers=1,
        )  # fmt: skip
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.port}"
        driver = open_chromium((1120, 640))
        try:
            driver.get(f"{address}/drawn/3/0")  # torch is loaded now
            shoot(driver, f"{address}/samples", out / "browse_samples.png")
            shoot(driver, f"{address}/run/digits", out / "browse_run.png")
        finally:
            driver.quit()
            server.shutdown()
    for path in sorted(out.glob("*.png")):
        print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="screenshots.py",
        description="Make the pictures of the documentation anew.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write to")
    parser.add_argument("--pictures", type=Path, required=True, metavar="FOLDER", help="class folders of pictures free to redistribute")
    parser.add_argument("--epochs", type=integer(1), default=12, metavar="N", help="epochs that the digits are trained (default: 12)")
    args = parser.parse_args(argv)
    for needed in (CHROMIUM, DRIVER, args.pictures):
        if not Path(needed).exists():
            print(f"screenshots.py: error: {needed} is not there", file=sys.stderr)
            return 2
    make(args.out, args.pictures, args.epochs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
