"""The Python examples of the README and the documents run as they stand."""

import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent


def test_examples_run_one_after_the_other(tmp_path):
    """The README's first, which those of the documents go on from."""
    texts = [path.read_text() for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))]
    blocks = re.findall(r"```python\n(.*?)```", "\n".join(texts), flags=re.DOTALL)
    assert len(blocks) >= 2
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    finished = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
