"""Trains a byte-level Mixture-of-Experts language model on real text.

    python examples/train_lm.py

learns the Python standard library's sources, expert-parallel over all devices: the GPUs, or 8 host
devices on a machine without one. It resumes from --checkpoint_dir when that holds a checkpoint, and
Ctrl-C or SIGTERM saves one. At the end it writes a picture of the loss and of the experts' load.
"""

import logging as python_logging
import math
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from lm import corpus as corpora
from lm import loop, model, plot, training
from lm.checkpoint import Checkpoints
from lm.history import History
from lm.inputs import InputError, check_writable
from lm.stop import StopRequest

import jax_mok
from jax_mok import quantize

HOST_DEVICES = 8
FINAL_STEPS = 20  # the reported training loss is their mean

FLAGS = flags.FLAGS
flags.DEFINE_string(
    "corpus",
    None,
    "File or directory to learn from. Default: the .py files of the Python standard library "
    f"without its tests, up to {corpora.DEFAULT_MIB} MiB.",
)
flags.DEFINE_integer("steps", 800, "Training steps of the whole run.", lower_bound=1)
flags.DEFINE_integer("batch", 16, "Sequences a step; a multiple of the devices.", lower_bound=1)
flags.DEFINE_integer("context", 128, "Bytes of a sequence.", lower_bound=1)
flags.DEFINE_integer(
    "d_model", 128, f"Width; a multiple of {model.HEAD_WIDTH}, on GPUs of 64.", lower_bound=1
)
flags.DEFINE_integer("layers", 2, "Transformer layers.", lower_bound=1)
flags.DEFINE_integer("experts", 16, "Experts a layer; a multiple of the devices.", lower_bound=1)
flags.DEFINE_integer("top_k", 2, "Experts each byte is sent to.", lower_bound=1)
flags.DEFINE_integer(
    "expert_width", 128, "Hidden width of an expert; on GPUs a multiple of 64.", lower_bound=1
)
flags.DEFINE_float("learning_rate", 3e-3, "Peak learning rate of AdamW.", lower_bound=0.0)
flags.DEFINE_enum(
    "dtype",
    None,
    ["float32", "bfloat16"],
    "Type of the activations; weights are float32 always. "
    "Default: float32 on CPUs, bfloat16 on GPUs.",
)
flags.DEFINE_enum(
    "precision",
    "operands",
    ["operands", "mxfp8"],
    "What the experts' products are made of: operands of --dtype, or rounded to MXFP8. "
    "The float32 weights are what is trained, either way.",
)
flags.DEFINE_integer("seed", 0, "Seed of the weights and of the data order.", lower_bound=0)
flags.DEFINE_string("checkpoint_dir", "train_lm_checkpoints", "Where checkpoints are kept.")
flags.DEFINE_integer("checkpoint_every", 100, "Steps between checkpoints.", lower_bound=1)
flags.DEFINE_string("plot", "train_lm.png", "The picture to write.")

# A resumed run may differ in the others, for example have more --steps.
FIXED_FLAGS = ("batch", "context", "d_model", "layers", "experts", "top_k", "expert_width", "seed")


def main(argv: list[str]) -> None:
    """Trains, reports and draws; bad input ends the program with its message."""
    if argv[1:]:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; all options are --flags")
    logging.get_absl_handler().addFilter(_is_of_interest)
    try:
        _run(StopRequest())
    except InputError as error:
        sys.exit(f"train_lm: {error}")


def _run(stop: StopRequest) -> None:
    _split_host()
    devices = len(jax.devices())
    _check_sizes(devices)
    corpus = corpora.load(FLAGS.corpus, context=FLAGS.context)
    check_writable(Path(FLAGS.plot).absolute().parent, f"--plot={FLAGS.plot}")
    fixed = {name: getattr(FLAGS, name) for name in FIXED_FLAGS}
    checkpoints = Checkpoints(FLAGS.checkpoint_dir, fixed | {"corpus": corpus.fingerprint})
    resumed = checkpoints.latest or 0
    if resumed > FLAGS.steps:
        raise InputError(
            f"--steps={FLAGS.steps} is less than the {resumed} steps of the run in "
            f"--checkpoint_dir={FLAGS.checkpoint_dir}. Give at least {resumed}, "
            "or another --checkpoint_dir to start anew."
        )

    # Auto axes: XLA places all but the MoE layer, which is given the mesh.
    mesh = jax.make_mesh((devices,), (model.AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    programs = training.build(
        _model_config(), mesh, learning_rate=FLAGS.learning_rate, steps=FLAGS.steps
    )
    state, history = programs.init(FLAGS.seed), History()
    _announce(corpus, state)
    if resumed:
        state, history = checkpoints.restore(state)
        logging.info("Resumed at step %d of %d.", resumed, FLAGS.steps)
    if resumed == FLAGS.steps:
        logging.info(
            "That run is finished. Give more --steps to go on with it, "
            "or another --checkpoint_dir to start anew."
        )
    schedule = loop.Schedule(
        steps=FLAGS.steps,
        batch=FLAGS.batch,
        context=FLAGS.context,
        seed=FLAGS.seed,
        checkpoint_every=FLAGS.checkpoint_every,
    )
    state = loop.train(programs, state, history, corpus, checkpoints, schedule, stop)
    checkpoints.save(len(history), state, history)
    jax_mok.check()
    if len(history):
        plot.draw(Path(FLAGS.plot), history, entropy=corpus.unigram_entropy, title=_title())
    _report(history, corpus)


def _is_of_interest(record: python_logging.LogRecord) -> bool:
    """Leaves out the chatter of the libraries that log through absl as well."""
    here = Path(__file__).resolve().parent
    return (
        record.levelno >= python_logging.WARNING or here in Path(record.pathname).resolve().parents
    )


def _split_host() -> None:
    """Makes the CPU several devices, unless XLA_FLAGS says how many; GPUs are not affected."""
    flag, given = "--xla_force_host_platform_device_count", os.environ.get("XLA_FLAGS", "")
    if flag not in given:
        os.environ["XLA_FLAGS"] = f"{given} {flag}={HOST_DEVICES}".strip()


def _check_sizes(devices: int) -> None:
    """Raises InputError for flags that do not fit each other or the number of devices."""
    for name in ("batch", "experts"):
        value = getattr(FLAGS, name)
        if value % devices:
            raise InputError(
                f"--{name}={value} cannot be shared out evenly over {devices} devices. "
                f"Give a multiple of {devices}, such as {math.ceil(value / devices) * devices}, "
                "or use fewer devices."
            )
    if FLAGS.top_k > FLAGS.experts:
        raise InputError(
            f"--top_k={FLAGS.top_k} is more than --experts={FLAGS.experts}: a byte goes to "
            "different experts. Give a smaller --top_k or more --experts."
        )
    if FLAGS.d_model % model.HEAD_WIDTH:
        raise InputError(
            f"--d_model={FLAGS.d_model} does not split into attention heads of width "
            f"{model.HEAD_WIDTH}. Give a multiple of {model.HEAD_WIDTH}."
        )
    if FLAGS.precision == "mxfp8" and FLAGS.expert_width % quantize.BLOCK:
        raise InputError(
            f"--expert_width={FLAGS.expert_width} does not split into MXFP8's blocks of "
            f"{quantize.BLOCK}. Give a multiple of {quantize.BLOCK}."
        )


def _model_config() -> model.ModelConfig:
    on_cpu = jax.default_backend() == "cpu"
    return model.ModelConfig(
        d_model=FLAGS.d_model,
        layers=FLAGS.layers,
        experts=FLAGS.experts,
        top_k=FLAGS.top_k,
        expert_width=FLAGS.expert_width,
        dtype=jnp.dtype(FLAGS.dtype or ("float32" if on_cpu else "bfloat16")),
        precision=FLAGS.precision,
    )


def _announce(corpus: corpora.Corpus, state: training.State) -> None:
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
    print(f"corpus           {corpus.name}, {corpus.size / 2**20:.1f} MiB")
    print(f"unigram entropy  {_per_byte(corpus.unigram_entropy)}")
    print(f"model            {_title()}, {parameters:,} parameters", flush=True)


def _report(history: History, corpus: corpora.Corpus) -> None:
    done = len(history)
    if done < FLAGS.steps:
        print(
            f"stopped after step {done} of {FLAGS.steps}; the same command goes on from the "
            f"checkpoint in {FLAGS.checkpoint_dir}"
            if done
            else "stopped before the first step"
        )
        return
    validation = history.validation[-1]
    print(f"training loss    {_per_byte(float(np.mean(history.losses[-FINAL_STEPS:])))}")
    print(
        f"validation loss  {_per_byte(validation)}, "
        f"{corpus.unigram_entropy - validation:.3f} nats under the unigram entropy"
    )
    print(f"picture          {FLAGS.plot}")
    print(f"checkpoint       {FLAGS.checkpoint_dir}")


def _per_byte(nats: float) -> str:
    return f"{nats:.3f} nats/byte ({nats / math.log(2):.3f} bits/byte)"


def _title() -> str:
    return (
        f"{FLAGS.layers}-layer byte-level MoE transformer, top-{FLAGS.top_k} of "
        f"{FLAGS.experts} experts, {len(jax.devices())} {jax.default_backend().upper()} devices"
    )


if __name__ == "__main__":
    app.run(main)
