"""Expert-parallel Mixture-of-Experts layer for JAX: one call, deterministic to the bit.

Beside the names here, `jax_mok.router` has routers, their losses and loads, and `jax_mok.quantize`
arrays in MXFP8. What needs other libraries is imported by its own name: `jax_mok.flax`,
`jax_mok.equinox`, `jax_mok.checkpoints`.
"""

import importlib.util
import pkgutil

# In a checkout's folder Python takes this package from there; the native module lies only in the
# installed copy.
__path__ = pkgutil.extend_path(__path__, __name__)

from jax_mok.versions import check_jax_version, package_version

check_jax_version()
if importlib.util.find_spec("jax_mok._native") is None:
    raise ImportError(
        "the native module of jax_mok is not built: run `pip install .` in the checkout"
    )

from jax_mok import ffi as _ffi  # noqa: E402
from jax_mok import quantize, router  # noqa: E402
from jax_mok.choices import ChoiceCounts  # noqa: E402
from jax_mok.config import MoEConfig  # noqa: E402
from jax_mok.errors import MoEError, MoEInputError, MoETimeoutError  # noqa: E402
from jax_mok.faults import check  # noqa: E402
from jax_mok.ffi import export_safety_checks  # noqa: E402
from jax_mok.memory import Memory, memory  # noqa: E402
from jax_mok.moe import moe, moe_ffn, remat_policy  # noqa: E402
from jax_mok.plan import Plan, build_plan  # noqa: E402
from jax_mok.prepare import prepare_weights  # noqa: E402
from jax_mok.reference import reference_moe  # noqa: E402

__version__ = package_version()

_ffi.register()

__all__ = [
    "ChoiceCounts",
    "Memory",
    "MoEConfig",
    "MoEError",
    "MoEInputError",
    "MoETimeoutError",
    "Plan",
    "__version__",
    "build_plan",
    "check",
    "export_safety_checks",
    "memory",
    "moe",
    "moe_ffn",
    "prepare_weights",
    "quantize",
    "reference_moe",
    "remat_policy",
    "router",
]
