"""The exceptions of the package."""


class MoEError(RuntimeError):
    """Something went wrong in an MoE call."""


class MoEInputError(MoEError, ValueError):
    """A shape, dtype, mesh, config value or expert id that the layer cannot take."""


class MoETimeoutError(MoEError):
    """A rank did not come to a meeting within `MoEConfig.timeout_s`."""
