"""The training run keeps its promises, at a tiny size and as its user starts it: as a program."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from matplotlib import image

SCRIPT = Path(__file__).parents[1] / "examples" / "train_lm.py"
STEPS = 120
TINY = {
    "steps": STEPS,
    "batch": 8,
    "context": 32,
    "d_model": 32,
    "layers": 1,
    "experts": 8,
    "expert_width": 32,
    "learning_rate": 0.01,
    "checkpoint_every": 20,
}


def command(folder: Path, **flags) -> list[str]:
    given = TINY | {
        "corpus": textwrap.__file__,
        "checkpoint_dir": folder / "checkpoints",
        "plot": folder / "picture.png",
    }
    given = {name: value for name, value in (given | flags).items() if value is not None}
    return [sys.executable, str(SCRIPT), *(f"--{name}={value}" for name, value in given.items())]


def environment(xla_flags: str = "") -> dict[str, str]:
    """The user's environment: without the device count that the other tests run with."""
    return os.environ | {"XLA_FLAGS": xla_flags, "JAX_PLATFORMS": "cpu"}


@dataclass
class Outcome:
    code: int
    out: str
    err: str


def train(folder: Path, xla_flags: str = "", **flags) -> Outcome:
    done = subprocess.run(
        command(folder, **flags),
        env=environment(xla_flags),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def interrupt(folder: Path, number: signal.Signals, *, after: int) -> Outcome:
    """Sends the signal as soon as the checkpoint after step `after` is there."""
    process = subprocess.Popen(
        command(folder),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not (folder / "checkpoints" / str(after)).exists() and process.poll() is None:
        assert time.monotonic() < deadline, f"no checkpoint after step {after}"
        time.sleep(0.002)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    return Outcome(process.returncode, out, err)


def history(folder: Path) -> dict[str, np.ndarray]:
    checkpoints = folder / "checkpoints"
    latest = max(int(entry.name) for entry in checkpoints.iterdir() if entry.name.isdigit())
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(checkpoints / str(latest) / "history")


@pytest.fixture(scope="module", autouse=True)
def shared_compilations(tmp_path_factory) -> Iterator[None]:
    """Each program is compiled once and not once a run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, Outcome]:
    """A run from the first step to the last, and where it left its files."""
    folder = tmp_path_factory.mktemp("whole")
    outcome = train(folder)
    assert outcome.code == 0, outcome.err
    return folder, outcome


def test_learns_well_below_the_unigram_entropy_that_it_prints(whole):
    def nats(line: str) -> float:
        found = re.search(rf"^{line} +([0-9.]+) nats/byte", whole[1].out, re.MULTILINE)
        assert found, whole[1].out
        return float(found[1])

    data = np.fromfile(textwrap.__file__, np.uint8)
    shares = np.unique(data, return_counts=True)[1] / len(data)
    assert nats("unigram entropy") == pytest.approx(-(shares * np.log(shares)).sum(), abs=1e-3)
    assert nats("training loss") < nats("unigram entropy") - 0.5
    assert nats("validation loss") < nats("unigram entropy") - 0.3


def test_runs_on_eight_host_devices_unless_xla_flags_say_otherwise(whole, tmp_path):
    assert "8 CPU devices" in whole[1].out
    three = train(tmp_path, "--xla_force_host_platform_device_count=3")
    assert "--batch=8 cannot be shared out evenly over 3 devices" in three.err


@pytest.fixture(scope="module")
def losses_in_bfloat16(tmp_path_factory) -> dict[str, np.ndarray]:
    folder = tmp_path_factory.mktemp("bfloat16")
    outcome = train(folder, dtype="bfloat16")
    assert outcome.code == 0, outcome.err
    return history(folder)


def test_bfloat16_activations_train_with_float32_weights(losses_in_bfloat16):
    losses = losses_in_bfloat16["losses"]
    assert losses[15:20].mean() < losses[:5].mean() - 1


def test_mxfp8_trains_to_within_a_hundredth_of_bfloat16(losses_in_bfloat16, tmp_path):
    outcome = train(tmp_path, dtype="bfloat16", precision="mxfp8")
    assert outcome.code == 0, outcome.err
    in_mxfp8 = history(tmp_path)
    assert np.any(in_mxfp8["losses"] != losses_in_bfloat16["losses"])
    for name, last in (("losses", 20), ("validation", 1)):
        want = losses_in_bfloat16[name][-last:].mean()
        assert in_mxfp8[name][-last:].mean() == pytest.approx(want, rel=1e-2), name


def test_picture_is_an_image_with_more_than_a_blank_page(whole):
    pixels = image.imread(whole[0] / "picture.png")
    assert min(pixels.shape[:2]) > 500
    assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 100


def test_interrupted_twice_and_resumed_has_the_same_bits_as_an_uninterrupted_run(whole, tmp_path):
    for number, after in ((signal.SIGINT, 20), (signal.SIGTERM, 60)):
        stopped = interrupt(tmp_path, number, after=after)
        assert stopped.code == 0, stopped.err
        assert re.search(rf"stopped after step \d+ of {STEPS}", stopped.out), stopped
        assert after <= len(history(tmp_path)["losses"]) < STEPS
    finished = train(tmp_path)
    assert finished.code == 0, finished.err
    assert "Resumed at step" in finished.err
    for name, values in history(whole[0]).items():
        np.testing.assert_array_equal(history(tmp_path)[name], values, err_msg=name)
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_finished_run_reports_again_without_training(whole):
    again = train(whole[0])
    assert again.code == 0, again.err
    assert "That run is finished" in again.err
    assert again.out == whole[1].out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"corpus": "missing.txt"},
            r"--corpus=missing\.txt does not exist\. Give a text file or a directory",
        ),
        ({"corpus": os.devnull}, r"the corpus /dev/null is empty .*Give --corpus a text file"),
        (
            {"context": 10**6},
            r"has \d+ bytes; .* --context \+ 1 = 1000001 bytes.*smaller --context",
        ),
        ({"batch": 12}, r"--batch=12 cannot be shared .* 8 devices\. Give a multiple of 8"),
        ({"experts": 4}, r"--experts=4 cannot be shared .* 8 devices\. Give a multiple of 8"),
        ({"top_k": 9}, r"--top_k=9 is more than --experts=8.*smaller --top_k"),
        (
            {"precision": "mxfp8", "expert_width": 40},
            r"--expert_width=40 does not split into MXFP8's .*Give a multiple of 32",
        ),
        ({"d_model": 40}, r"--d_model=40 does not split .*Give a multiple of 32"),
        (
            {"checkpoint_dir": f"{SCRIPT}/x"},
            r"--checkpoint_dir=\S+/x cannot be written: .*Give a place",
        ),
        ({"plot": f"{SCRIPT}/x.png"}, r"--plot=\S+x\.png cannot be written: .*Give a place"),
        (
            {"learning_rate": 1e30, "steps": 3},
            r"not finite at step 3\. Give a lower --learning_rate",
        ),
        ({"steps": 0}, r"flag --steps=0: 0 is not a positive integer"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_input_is_refused_with_what_was_given_and_what_to_do(flags, message, tmp_path):
    outcome = train(tmp_path, **flags)
    assert outcome.code == 1
    assert re.search(message, outcome.err), outcome.err
    assert "Traceback" not in outcome.err
    assert not (tmp_path / "picture.png").exists()


def test_empty_directory_is_an_empty_corpus(tmp_path):
    (tmp_path / "texts").mkdir()
    outcome = train(tmp_path, corpus=tmp_path / "texts")
    assert outcome.code == 1
    assert "is empty (0 files, 0 bytes)" in outcome.err


def test_checkpoint_of_other_settings_is_refused_and_kept(whole):
    outcome = train(whole[0], corpus=None, experts=16)
    assert outcome.code == 1
    assert "experts was 8 and is now 16" in outcome.err
    assert "another --checkpoint_dir" in outcome.err
    assert len(history(whole[0])["losses"]) == STEPS


def test_fewer_steps_than_the_checkpoint_has_are_refused(whole):
    outcome = train(whole[0], steps=STEPS - 1)
    assert outcome.code == 1
    assert f"Give at least {STEPS}" in outcome.err
