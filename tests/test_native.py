"""Host programs that hold the GPU kernels' plan and schedule to what they rely on."""

import os
import pathlib
import subprocess

import pytest

HERE = pathlib.Path(__file__).parent
PROGRAMS = sorted((HERE / "native").glob("*.cc"))


@pytest.mark.parametrize("source", PROGRAMS, ids=lambda path: path.stem)
def test_native_program_passes(source, tmp_path):
    program = tmp_path / source.stem
    compiler = os.environ.get("CXX", "c++")
    flags = ["-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{HERE.parent / 'cuda'}"]
    subprocess.run([compiler, *flags, str(source), "-o", str(program)], check=True)
    finished = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stdout
