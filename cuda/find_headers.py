"""Prints the include folder of a Python package, fetching its wheel if it lacks the header.

Arguments: import name of the package, requirement, path of a header inside the package, and a
folder to fetch into. The printed folder is the part of the path up to and with "include".
"""

import importlib.metadata
import importlib.util
import pathlib
import subprocess
import sys
import zipfile

# Headers are the same for every Python and machine: take what exists.
PLATFORMS = ["manylinux_2_28", "manylinux_2_27", "manylinux_2_18", "manylinux2014"]
PYTHON_OF_WHEELS = "3.12"


def find(package: str, requirement: str, header: str) -> pathlib.Path | None:
    """The header in the installed package, if that is of the required version."""
    distribution, version = requirement.split("==")
    try:
        if importlib.metadata.version(distribution) != version:
            return None
    except importlib.metadata.PackageNotFoundError:
        return None
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (pathlib.Path(folder) / header).exists():
            return pathlib.Path(folder) / header
    return None


def fetch(package: str, requirement: str, header: str, folder: pathlib.Path) -> pathlib.Path:
    """The header in an unpacked wheel."""
    unpacked = folder / requirement
    if not (unpacked / package / header).exists():
        tags = [f"--platform={name}_x86_64" for name in PLATFORMS]
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        options = ["--only-binary=:all:", f"--python-version={PYTHON_OF_WHEELS}", *tags]
        subprocess.run([*pip, *options, "--dest", str(unpacked), requirement], check=True)
        for wheel in unpacked.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked)
            wheel.unlink()
    return unpacked / package / header


def main() -> None:
    """Prints the folder."""
    package, requirement, header, folder = sys.argv[1:]
    found = find(package, requirement, header) or fetch(
        package, requirement, header, pathlib.Path(folder)
    )
    print(next(folder for folder in found.parents if folder.name == "include"))


if __name__ == "__main__":
    main()
