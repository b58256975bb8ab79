"""The small examples run as their users start them, and show what they promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, cwd: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    finished = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        env=environment | {"JAX_PLATFORMS": "cpu"},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_the_first_layer_shows_shapes_and_shardings(tmp_path):
    out = run("first_layer.py", tmp_path)
    assert "A mesh of 8 cpu devices" in out
    parts = {"x": "(128, 256)", "gate": "(2, 256, 512)", "d down": "(2, 512, 256)"}
    for name, part in parts.items():
        line = rf"^{name} .*P(artitionSpec)?\('ep',?\) +a device: {re.escape(part)}$"
        assert re.search(line, out, re.MULTILINE), name
    assert "has found no fault" in out


def test_two_processes_agree(tmp_path):
    lines = run("two_processes.py", tmp_path).splitlines()
    said = dict(line.split(" has rows ", 1) for line in lines if line.startswith("process "))
    assert set(said) == {"process 0", "process 1"}
    assert said["process 0"].startswith("0..256 of y (512, 128)")
    assert said["process 1"].startswith("256..512 of y (512, 128)")
    of_all = {text.split("of all, ", 1)[1] for text in said.values()}
    assert len(of_all) == 1
