"""What a JAX user could write instead of this layer: to be measured beside it, not to be used.

Each peer is a function of one device's arrays inside `jax.shard_map`, as `jax_mok.moe_ffn`.
"""
