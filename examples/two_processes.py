"""One layer over two processes, as on two machines: what each of them has to do.

    python examples/two_processes.py

starts two processes of itself on this machine, each with one device (a GPU, if there are two), that
find each other through jax.distributed. A cluster's launcher starts them on several machines
instead; then --coordinator is the address of the first one's machine.
"""

import logging
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mok
from jax_mok import router

PROCESSES = 2
TOKENS, HIDDEN, INNER, EXPERTS, CHOICES = 512, 128, 256, 8, 2

FLAGS = flags.FLAGS
flags.DEFINE_string(
    "coordinator", None, "host:port of the first process. Default: start both here."
)
flags.DEFINE_integer("process", 0, "Which of them this one is.", lower_bound=0)
flags.DEFINE_integer("gpu", None, "Which of the machine's GPUs it uses, if any. Default: all.")


def main(argv: list[str]) -> None:
    """Starts the processes, or is one of them."""
    if argv[1:]:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; all options are --flags")
    # JAX's notes on backends that this machine does not have look like errors.
    logging.getLogger("jax").setLevel(logging.WARNING)
    if FLAGS.coordinator is None:
        sys.exit(_start_both())
    jax.distributed.initialize(
        FLAGS.coordinator,
        num_processes=PROCESSES,
        process_id=FLAGS.process,
        local_device_ids=None if FLAGS.gpu is None else [FLAGS.gpu],
    )
    _run()


def _start_both() -> int:
    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, __file__, f"--coordinator=localhost:{port}"]
    processes = [
        subprocess.Popen([*command, f"--process={process}", f"--gpu={process}"])
        for process in range(PROCESSES)
    ]
    return max(abs(process.wait()) for process in processes)


def _run() -> None:
    mesh = jax.make_mesh((PROCESSES,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    split = NamedSharding(mesh, P("ep"))
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16

    # Every process brings its own part: its tokens, its experts.
    mine = np.random.default_rng(FLAGS.process)

    def part(*shape: int, fan_in: int = 1) -> jax.Array:
        values = mine.standard_normal(shape) / fan_in**0.5
        return jax.make_array_from_process_local_data(split, values.astype(dtype))

    x = part(TOKENS // PROCESSES, HIDDEN)
    gate, up = (part(EXPERTS // PROCESSES, HIDDEN, INNER, fan_in=HIDDEN) for _ in range(2))
    down = part(EXPERTS // PROCESSES, INNER, HIDDEN, fan_in=INNER)
    logits = part(TOKENS // PROCESSES, EXPERTS)

    @jax.jit
    def step(x, logits, *experts):
        ids, weights, _ = router.Router(CHOICES)(logits)
        y = jax_mok.moe(x, ids, weights, *experts, mesh=mesh, axis_name="ep")
        return y, jnp.mean(y.astype(jnp.float32) ** 2), router.load_of(ids, EXPERTS).counts

    y, mean_square, counts = step(x, logits, gate, up, down)
    jax_mok.check()
    rows = y.addressable_shards[0].index[0]
    # In one write, the line's end included: both processes share the terminal.
    print(
        f"process {FLAGS.process} has rows {rows.start or 0}..{rows.stop or TOKENS} of y "
        f"{y.shape}; of all, mean square {float(mean_square):.6f}, choices of each expert "
        f"{np.asarray(counts).tolist()}\n",
        end="",
        flush=True,
    )


if __name__ == "__main__":
    app.run(main)
