"""The small examples run as their users start them, and show what they promise."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
ANY = ""  # JAX tries all platforms that it knows


def run(name: str, cwd: Path, *flags: str, code: int = 0, platforms: str = "cpu") -> str:
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    finished = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *flags],
        env=environment | {"JAX_PLATFORMS": platforms, "CUDA_VISIBLE_DEVICES": ""},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert finished.returncode == code, finished.stderr
    assert "Unable to initialize backend 'tpu'" not in finished.stderr
    return finished.stderr if code else finished.stdout


def test_the_first_layer_shows_shapes_and_shardings(tmp_path):
    out = run("first_layer.py", tmp_path)
    assert "A mesh of 8 cpu devices" in out
    parts = {"x": "(128, 256)", "gate": "(2, 256, 512)", "d down": "(2, 512, 256)"}
    for name, part in parts.items():
        line = rf"^{name} .*P(artitionSpec)?\('ep',?\) +a device: {re.escape(part)}$"
        assert re.search(line, out, re.MULTILINE), name
    assert "has found no fault" in out


def test_two_processes_agree(tmp_path):
    lines = run("two_processes.py", tmp_path, platforms=ANY).splitlines()
    said = dict(line.split(" has rows ", 1) for line in lines if line.startswith("process "))
    assert set(said) == {"process 0", "process 1"}
    assert said["process 0"].startswith("0..256 of y (512, 128)")
    assert said["process 1"].startswith("256..512 of y (512, 128)")
    of_all = {text.split("of all, ", 1)[1] for text in said.values()}
    assert len(of_all) == 1


TINY = ("--layers=1", "--context=16", "--batch=8", f"--corpus={textwrap.__file__}")


def test_the_equinox_twin_learns_and_goes_on_as_if_it_had_not_stopped(tmp_path):
    whole = run("train_equinox.py", tmp_path, *TINY, "--steps=60", "--save=whole")
    learnt = re.search(r"training loss ([\d.]+), unigram entropy ([\d.]+)", whole)
    assert float(learnt[1]) < float(learnt[2])
    assert "from step 0," in run("train_equinox.py", tmp_path, *TINY, "--steps=40", "--save=parts")
    assert "from step 40," in run("train_equinox.py", tmp_path, *TINY, "--steps=20", "--save=parts")
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()
    message = run("train_equinox.py", tmp_path, *TINY, "--layers=2", "--save=parts", code=1)
    assert "train_equinox: --save=parts holds no run of this model" in message


def test_the_equinox_twin_names_what_it_cannot_use(tmp_path):
    message = run("train_equinox.py", tmp_path, *TINY, "--batch=12", code=1, platforms=ANY)
    assert "--batch=12 cannot be shared out evenly over 8 devices" in message
