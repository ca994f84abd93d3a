"""Prints docs/check.md's tables: each sample of a serve command and the first two lines of
`magicdec check` on it.

    python scripts/check_samples.py
"""

from __future__ import annotations

from pathlib import Path

from magicdec.live.check import check_command
from magicdec.live.check_text import lines_of
from magicdec.live.load import AskedLoad
from magicdec.specs.serve_command import read_serve_command

SAMPLES = Path(__file__).resolve().parent.parent / "docs" / "samples"
DEVICES = {
    "container.sh": "gb10",
    "not-exact.sh": "h200",
    "pod.yaml": None,
    "ray.py": None,
}
"""Devices that a sample asks for, where they are not an H100; None: the file names its own."""
BATCH = 16


def main() -> None:
    for folder in ("serve", "faults"):
        print("| sample | its first two lines |\n|---|---|")
        for path in sorted((SAMPLES / folder).iterdir()):
            device = DEVICES.get(path.name, "h100")
            command = read_serve_command(
                path.read_text(encoding="utf-8"), folder=path.parent
            )
            result = check_command(command, AskedLoad(hardware=device, batch=BATCH))
            first, second = (line.text for line in list(lines_of(result))[:2])
            link = f"[{path.name}](samples/{folder}/{path.name})"
            option = f" `--hardware {device}`" if device else ""
            print(f"| {link}{option} | {first}<br>`{second}` |", flush=True)
        print()


if __name__ == "__main__":
    main()
