"""Host programs under sanitizers: the GPU kernels' plan and schedule, and the CPU devices' code.

Beside its own text a program may name, in comments,

    // links: host/plan_builder.cc host/faults.cc
    // sanitizers: address,undefined thread

sources below cuda/ that belong to it, and the sanitizers of each build of it (without this line
one build, with the first two).
"""

import os
import pathlib
import re
import subprocess

import pytest

HERE = pathlib.Path(__file__).parent
CUDA = HERE.parent / "cuda"
MEMORY_AND_ARITHMETIC = "address,undefined"


def words_after(label: str, source: pathlib.Path) -> list[str]:
    lines = re.findall(rf"^// {label}: (.*)$", source.read_text(), re.MULTILINE)
    return " ".join(lines).split()


BUILDS = [
    pytest.param(source, sanitizers, id=f"{source.stem}-{sanitizers}")
    for source in sorted((HERE / "native").glob("*.cc"))
    for sanitizers in words_after("sanitizers", source) or [MEMORY_AND_ARITHMETIC]
]


@pytest.mark.parametrize(("source", "sanitizers"), BUILDS)
def test_native_program_passes(source: pathlib.Path, sanitizers: str, tmp_path: pathlib.Path):
    program = tmp_path / source.stem
    compiler = os.environ.get("CXX", "c++")
    sources = [source, *(CUDA / name for name in words_after("links", source))]
    # As in CMakeLists.txt, products and sums are not contracted: results are compared bit for bit.
    flags = ["-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off"]
    checks = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    command = [compiler, *flags, *checks, "-pthread", f"-I{CUDA}", *sources, "-o", program]
    subprocess.run(command, check=True)
    finished = subprocess.run([program], capture_output=True, text=True, timeout=240)
    assert finished.returncode == 0, finished.stdout + finished.stderr
