"""The small twin of train_lm.py in Equinox: a byte-level MoE language model, few lines around it.

    python examples/train_equinox.py

learns the Python standard library's sources, expert-parallel over all devices: the GPUs, or 8 host
devices on a machine without one. The model and Adam's moments go to --save, from which the next run
goes on.
"""

import logging
import math
import os
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from jax.sharding import NamedSharding, PartitionSpec
from lm import corpus as corpora
from lm.inputs import InputError, check_writable

import jax_mok
from jax_mok.equinox import MoE
from jax_mok.router import Router, load_balancing_loss

HOST_DEVICES, AXIS = 8, "ep"
BALANCE_WEIGHT = 0.01  # of the load-balancing loss; the value of Switch Transformer
LEARNING_RATE, WARM_UP = 3e-3, 20
BYTES, WIDTH, HEADS, EXPERT_WIDTH, EXPERTS, TOP_K = 256, 128, 4, 128, 16, 2
REPORTS = 10  # a run

FLAGS = flags.FLAGS
flags.DEFINE_string("corpus", None, "File or directory to learn from. Default: Python's library.")
flags.DEFINE_integer("steps", 400, "Training steps of this run.", lower_bound=1)
flags.DEFINE_integer("batch", 16, "Sequences a step; a multiple of the devices.", lower_bound=1)
flags.DEFINE_integer("context", 128, "Bytes of a sequence.", lower_bound=1)
flags.DEFINE_integer("layers", 2, "Transformer layers.", lower_bound=1)
flags.DEFINE_integer("seed", 0, "Seed of the weights and of the data order.", lower_bound=0)
flags.DEFINE_string("save", "train_equinox.eqx", "Where the run is kept.")


class Layer(eqx.Module):
    """Pre-norm attention and experts on a batch: [B, S, H] -> [B, S, H]."""

    norms: tuple[eqx.nn.RMSNorm, eqx.nn.RMSNorm]
    attention: eqx.nn.MultiheadAttention
    positions: eqx.nn.RotaryPositionalEmbedding
    experts: MoE

    def __init__(self, mesh: jax.sharding.Mesh, dtype: jnp.dtype, *, key: jax.Array):
        """Makes the weights; `mesh` is the one the layer will run on."""
        of_attention, of_experts = jax.random.split(key)
        self.norms = eqx.nn.RMSNorm(WIDTH), eqx.nn.RMSNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=of_attention)
        self.positions = eqx.nn.RotaryPositionalEmbedding(WIDTH // HEADS)
        self.experts = MoE(
            WIDTH,
            EXPERT_WIDTH,
            EXPERTS,
            Router(TOP_K, renormalise=False),
            mesh=mesh,
            axis_name=AXIS,
            key=of_experts,
            dtype=dtype,
        )

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the output and the load-balancing loss."""
        x = x + jax.vmap(self._attend)(x)
        y, routing, _ = self.experts(jax.vmap(jax.vmap(self.norms[1]))(x))
        return x + y, load_balancing_loss(routing)

    def _attend(self, x: jax.Array) -> jax.Array:
        """Causal self-attention of one sequence [S, H]."""
        x = jax.vmap(self.norms[0])(x)
        mask = jnp.tril(jnp.ones((len(x), len(x)), bool))

        def rotate(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, ...]:
            by_head = jax.vmap(self.positions, in_axes=1, out_axes=1)
            return by_head(query), by_head(key), value

        return self.attention(x, x, x, mask, process_heads=rotate)


class Transformer(eqx.Module):
    """Next-byte model: int32 bytes [B, S] -> f32 logits [B, S, 256]."""

    embed: eqx.nn.Embedding
    layers: list[Layer]
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear

    def __init__(self, mesh: jax.sharding.Mesh, layers: int, dtype: jnp.dtype, *, key: jax.Array):
        """Makes the weights."""
        of_embed, of_head, *of_layers = jax.random.split(key, 2 + layers)
        self.embed = eqx.nn.Embedding(BYTES, WIDTH, key=of_embed)
        self.layers = [Layer(mesh, dtype, key=each) for each in of_layers]
        self.norm = eqx.nn.RMSNorm(WIDTH)
        self.head = eqx.nn.Linear(WIDTH, BYTES, use_bias=False, key=of_head)

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns logits and the layers' mean balancing loss."""
        x = jax.vmap(jax.vmap(self.embed))(tokens)
        balances = []
        for layer in self.layers:
            x, balance = layer(x)
            balances.append(balance)
        return jax.vmap(jax.vmap(lambda row: self.head(self.norm(row))))(x), jnp.mean(
            jnp.stack(balances)
        )


def loss_of(model: Transformer, sequences: jax.Array) -> tuple[jax.Array, jax.Array]:
    """With the balancing loss, to be minimised, and without, in nats per byte."""
    logits, balance = model(sequences[:, :-1])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, sequences[:, 1:]).mean()
    return loss + BALANCE_WEIGHT * balance, loss


def main(argv: list[str]) -> None:
    """Trains, saves and reports; bad input ends the program with its message."""
    if argv[1:]:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; all options are --flags")
    # JAX's notes on backends that this machine does not have look like errors.
    logging.getLogger("jax").setLevel(logging.WARNING)
    try:
        _run()
    except InputError as error:
        sys.exit(f"train_equinox: {error}")


def _run() -> None:
    _split_host()
    devices = len(jax.devices())
    for name, value in (("--batch", FLAGS.batch), ("experts", EXPERTS)):
        if value % devices:
            raise InputError(
                f"{name}={value} cannot be shared out evenly over {devices} devices: use a "
                f"multiple of {devices}, or fewer devices."
            )
    corpus = corpora.load(FLAGS.corpus, context=FLAGS.context)
    check_writable(Path(FLAGS.save).absolute().parent, f"--save={FLAGS.save}")
    mesh = jax.make_mesh((devices,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    by_rank = NamedSharding(mesh, PartitionSpec(AXIS))
    # The kernels of GPUs take bfloat16.
    dtype = jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.warmup_constant_schedule(0.0, LEARNING_RATE, WARM_UP), b2=0.95),
    )

    @eqx.filter_jit
    def init(seed: int) -> tuple[Transformer, optax.OptState, jax.Array]:
        model = Transformer(mesh, FLAGS.layers, dtype, key=jax.random.key(seed))
        return model, optimizer.init(eqx.filter(model, eqx.is_inexact_array)), jnp.int32(0)

    @eqx.filter_jit(donate="all")
    def step(
        state: tuple[Transformer, optax.OptState, jax.Array], sequences: jax.Array
    ) -> tuple[tuple[Transformer, optax.OptState, jax.Array], jax.Array]:
        model, moments, done = state
        gradient, loss = eqx.filter_grad(loss_of, has_aux=True)(model, sequences)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, moments = optimizer.update(gradient, moments, params)
        return (eqx.apply_updates(model, updates), moments, done + 1), loss

    state = init(FLAGS.seed)
    if Path(FLAGS.save).exists():
        state = _restore(state)
    first = int(state[2])
    print(f"from step {first}, {devices} {jax.default_backend()} devices", flush=True)
    losses: list[float] = []
    for number in range(first, first + FLAGS.steps):
        sequences = corpus.batch(number, seed=FLAGS.seed, batch=FLAGS.batch, context=FLAGS.context)
        state, loss = step(state, jax.device_put(sequences, by_rank))
        losses.append(float(loss))
        if (number - first + 1) % max(1, FLAGS.steps // REPORTS) == 0:
            print(f"step {number + 1}: {losses[-1]:.3f} nats/byte", flush=True)
    jax_mok.check()
    if not math.isfinite(losses[-1]):
        raise InputError(f"the loss is not finite after step {first + FLAGS.steps}; not saved.")
    unfinished = Path(f"{FLAGS.save}.new")
    with unfinished.open("wb") as file:
        eqx.tree_serialise_leaves(file, state)
    unfinished.replace(FLAGS.save)  # a run that dies while it saves leaves the one before
    print(
        f"training loss {np.mean(losses[-20:]):.3f}, unigram entropy "
        f"{corpus.unigram_entropy:.3f} nats/byte; kept in {FLAGS.save}"
    )


def _restore(
    state: tuple[Transformer, optax.OptState, jax.Array],
) -> tuple[Transformer, optax.OptState, jax.Array]:
    try:
        with Path(FLAGS.save).open("rb") as file:
            restored = eqx.tree_deserialise_leaves(file, state)
    except Exception as error:  # whatever numpy and Equinox raise for another file
        raise InputError(
            f"--save={FLAGS.save} holds no run of this model ({error}). Give the --layers it was "
            "made with, or another --save to start anew."
        ) from error
    # Serialised arrays come back on one device.
    placed = jax.tree.map(lambda leaf: leaf.sharding if eqx.is_array(leaf) else None, state)
    return eqx.filter_shard(restored, placed)


def _split_host() -> None:
    """Makes the CPU several devices, unless XLA_FLAGS says how many; GPUs are not affected."""
    flag, given = "--xla_force_host_platform_device_count", os.environ.get("XLA_FLAGS", "")
    if flag not in given:
        os.environ["XLA_FLAGS"] = f"{given} {flag}={HOST_DEVICES}".strip()


if __name__ == "__main__":
    app.run(main)
