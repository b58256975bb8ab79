"""The jitted programs: initial state, one training step, validation loss."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm.model import AXIS, ModelConfig, Transformer

BALANCE_WEIGHT = 0.01  # of the load-balancing loss; the value of Switch Transformer
State = dict[str, Any]  # {"params": ..., "optimizer": ...}


@dataclass(frozen=True)
class Programs:
    """What the training loop calls.

    Attributes:
      init: seed -> state, each leaf where it belongs on the mesh.
      step: (state, sequences) -> (state, loss, expert shares [layers, E]); the state is donated.
      evaluate: (params, sequences) -> mean cross entropy in nats per byte.
      batch_sharding: where sequences [batch, context + 1] belong.
    """

    init: Callable[[int], State]
    step: Callable[[State, jax.Array], tuple[State, jax.Array, jax.Array]]
    evaluate: Callable[[Any, jax.Array], jax.Array]
    batch_sharding: NamedSharding


def build(config: ModelConfig, mesh: Mesh, *, learning_rate: float, steps: int) -> Programs:
    """Builds the programs for a mesh with the one axis `AXIS`."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: Transformer(config, mesh, rngs=nnx.Rngs(0))))
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            optax.warmup_cosine_decay_schedule(
                init_value=0.0,
                peak_value=learning_rate,
                warmup_steps=max(1, steps // 20),
                decay_steps=max(2, steps),
                end_value=learning_rate / 20,
            ),
            b2=0.95,
            weight_decay=0.1,
        ),
    )

    def init(seed: jax.Array) -> State:
        model = Transformer(config, mesh, rngs=nnx.Rngs(jax.random.key(seed)))
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        return {"params": params, "optimizer": optimizer.init(params)}

    def loss_of(params: Any, sequences: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        logits, balance, shares = nnx.merge(graph, params)(sequences[:, :-1])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, sequences[:, 1:]).mean()
        return loss + BALANCE_WEIGHT * balance, (loss, shares)

    def step(state: State, sequences: jax.Array) -> tuple[State, jax.Array, jax.Array]:
        gradient, (loss, shares) = jax.grad(loss_of, has_aux=True)(state["params"], sequences)
        update, moments = optimizer.update(gradient, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], update)
        return {"params": params, "optimizer": moments}, loss, shares

    def evaluate(params: Any, sequences: jax.Array) -> jax.Array:
        _, (loss, _) = loss_of(params, sequences)
        return loss

    everywhere = NamedSharding(mesh, PartitionSpec())
    by_rank = NamedSharding(mesh, PartitionSpec(AXIS))
    # Adam's moments have the paths of their weights, so one rule places both.
    shardings = jax.tree.map_with_path(
        lambda path, _: by_rank if "['experts']" in jax.tree_util.keystr(path) else everywhere,
        jax.eval_shape(init, 0),
    )
    return Programs(
        init=jax.jit(init, out_shardings=shardings),
        step=jax.jit(
            step,
            in_shardings=(shardings, by_rank),
            out_shardings=(shardings, everywhere, everywhere),
            donate_argnums=0,
        ),
        evaluate=jax.jit(
            evaluate, in_shardings=(shardings["params"], by_rank), out_shardings=everywhere
        ),
        batch_sharding=by_rank,
    )
