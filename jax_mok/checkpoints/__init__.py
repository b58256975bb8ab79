"""MoE layers from Hugging Face checkpoints onto a mesh, and back.

    loaded = load_moe_layer("Mixtral-8x7B-v0.1", 3, mesh=mesh, axis_name="ep")
    module = jax_mok.flax.MoE.from_weights(*loaded, mesh=mesh, axis_name="ep")
    save_moe_layer("tuned", 3, module.weights())

Models: Mixtral, Qwen3-MoE, OLMoE, DeepSeek-V3. Refused, since the layer cannot compute them:
gpt-oss, anything with biases, fp8 and other quantised weights. Needs `safetensors`.
"""

from jax_mok.checkpoints.load import MoELayerWeights, load_moe_layer
from jax_mok.checkpoints.save import save_moe_layer

__all__ = ["MoELayerWeights", "load_moe_layer", "save_moe_layer"]
