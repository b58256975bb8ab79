"""Which composition a call takes, on which platform."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging
from harness import mesh_of
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_mok
from jax_mok import call, codec, ffi, reach

RANKS, TOKENS, HIDDEN, INNER, EXPERTS, TOP_K = 4, 64, 128, 64, 8, 2
CPU_TARGETS = ["jax_mok_plan", "jax_mok_dispatch", "jax_mok_combine", "jax_mok_weighted_sum"]
COLLECTIVE_TARGETS = ["jax_mok_plan_of_gathered_routes", "jax_mok_weighted_sum"]

with_gpu_kernels = pytest.mark.skipif(ffi.cuda is None, reason="built without GPU kernels")
with_peers = pytest.mark.skipif(
    ffi.cuda_peers is None, reason="built without GPU kernels, or JAX too old for those of peers"
)


def operands(dtype: str = "bfloat16", hidden: int = HIDDEN) -> list[jax.ShapeDtypeStruct]:
    x = jax.ShapeDtypeStruct((TOKENS, hidden), dtype)
    ids = jax.ShapeDtypeStruct((TOKENS, TOP_K), np.int32)
    weights = jax.ShapeDtypeStruct(ids.shape, np.float32)
    up = jax.ShapeDtypeStruct((EXPERTS, hidden, INNER), dtype)
    down = jax.ShapeDtypeStruct((EXPERTS, INNER, hidden), dtype)
    return [x, ids, weights, up, up, down]


def lower(
    platform: str,
    composition: str,
    mesh: Mesh | None = None,
    derive: bool = False,
    precision: str = "operands",
    saved_rows: int | None = None,
    **sizes: str | int,
) -> str:
    """The program's text."""
    config = jax_mok.MoEConfig(composition=composition, precision=precision, saved_rows=saved_rows)
    layer = functools.partial(
        jax_mok.moe, mesh=mesh or mesh_of(RANKS), axis_name="ep", config=config
    )
    step = jax.grad(lambda *ops: layer(*ops).astype(np.float32).sum()) if derive else layer
    # A new function each time, so that nothing is traced before.
    traced = jax.jit(lambda *ops: step(*ops)).trace(*operands(**sizes))
    return traced.lower(lowering_platforms=(platform,)).as_text()


def lower_plan(composition: str, mesh: Mesh) -> str:
    """The text of the program of `build_plan` on GPUs."""
    config = jax_mok.MoEConfig(composition=composition)
    build = functools.partial(
        jax_mok.build_plan, num_experts=EXPERTS, axis_name="ep", config=config
    )
    step = jax.shard_map(build, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    return jax.jit(step).trace(operands()[1]).lower(lowering_platforms=("cuda",)).as_text()


def targets(program: str) -> list[str]:
    return re.findall(r"custom_call @(jax_mok_\w+)", program)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("derive", [False, True])
def test_the_fused_composition_is_refused_elsewhere_than_on_gpus(platform, derive):
    reason = {
        "cpu": r"is the GPU kernel: on CPU devices use composition='auto'",
        "tpu": "GPUs only",
    }
    with pytest.raises(jax_mok.MoEError, match=reason[platform]):
        lower(platform, "fused", derive=derive)


@pytest.mark.parametrize(
    ("composition", "expected"),
    [("auto", CPU_TARGETS), ("composed", CPU_TARGETS), ("collective", COLLECTIVE_TARGETS)],
)
def test_calls_of_a_cpu_program(composition, expected):
    assert targets(lower("cpu", composition)) == expected


@with_peers
@pytest.mark.parametrize(
    ("composition", "expected"),
    [
        ("auto", ["jax_mok_forward_peers"]),
        ("fused", ["jax_mok_forward_peers"]),
        ("collective", COLLECTIVE_TARGETS),
    ],
)
def test_calls_of_a_gpu_program(composition, expected):
    assert targets(lower("cuda", composition)) == expected


@pytest.fixture
def old_jax(monkeypatch) -> None:
    """As for a JAX without the FFI's collectives extension; if this one is, nothing changes."""
    monkeypatch.setattr(ffi, "cuda_peers", None)


@with_gpu_kernels
@pytest.mark.usefixtures("old_jax")
@pytest.mark.parametrize("composition", ["auto", "fused", "composed"])
def test_one_gpu_takes_any_jax(composition):
    assert targets(lower("cuda", composition, mesh_of(1))) == ["jax_mok_forward_alone"]
    assert targets(lower_plan(composition, mesh_of(1))) == ["jax_mok_plan_alone"]


@with_gpu_kernels
@pytest.mark.usefixtures("old_jax")
@pytest.mark.parametrize("composition", ["auto", "fused", "composed"])
def test_gpus_that_meet_name_the_jax_they_need(composition):
    message = (
        r"of 4 ranks .* need JAX 0\.11\.2 or newer .* use MoEConfig\(composition='collective'\)"
    )
    with pytest.raises(jax_mok.MoEError, match=message):
        lower("cuda", composition)
    with pytest.raises(jax_mok.MoEError, match=message):
        lower_plan(composition, mesh_of(RANKS))


@with_gpu_kernels
@pytest.mark.usefixtures("old_jax")
def test_the_collective_composition_takes_any_jax():
    assert targets(lower("cuda", "collective")) == COLLECTIVE_TARGETS
    assert targets(lower_plan("collective", mesh_of(RANKS))) == COLLECTIVE_TARGETS[:1]


@with_peers
@pytest.mark.parametrize(("dtype", "hidden"), [("float32", 128), ("bfloat16", 100)])
def test_only_the_collective_composition_takes_any_dtype_and_width_on_gpus(dtype, hidden):
    assert targets(lower("cuda", "collective", dtype=dtype, hidden=hidden)) == COLLECTIVE_TARGETS
    with pytest.raises(jax_mok.MoEError, match=r"GPU kernels take (bfloat16|multiples of 64)"):
        lower("cuda", "fused", dtype=dtype, hidden=hidden)


@with_peers
@pytest.mark.parametrize("composition", ["auto", "fused", "composed"])
def test_mxfp8_on_gpus_is_the_same_calls_with_rounded_weights(composition):
    rounding = ["jax_mok_round"] * 3
    forward, backward = "jax_mok_forward_peers", "jax_mok_backward_peers"
    assert targets(lower("cuda", composition, precision="mxfp8")) == [*rounding, forward]
    program = lower("cuda", composition, derive=True, precision="mxfp8")
    assert targets(program) == [*rounding, forward, *rounding, backward]
    assert re.findall(r"mxfp8 = (\w+)", program) == ["true"] * 2


def operands_of_backward(program: str) -> int:
    (operands,) = re.findall(r"custom_call @jax_mok_backward_\w+\(([^)]*)\)", program)
    return operands.count("%")


@with_gpu_kernels
@pytest.mark.parametrize(("saved_rows", "more"), [(None, 0), (64, 2)])
def test_gate_and_up_of_the_forward_pass_go_to_a_backward_pass_that_may_replay(saved_rows, more):
    options = {"mesh": mesh_of(1), "derive": True, "saved_rows": saved_rows}
    count = operands_of_backward(lower("cuda", "fused", **options))
    in_mx = operands_of_backward(lower("cuda", "fused", precision="mxfp8", **options))
    assert (count, in_mx) == (11, 11 + more)


@with_gpu_kernels
@pytest.mark.parametrize("derive", [False, True])
def test_mxfp8_on_gpus_through_collectives_is_xla_s_but_for_the_conversions(derive):
    used = targets(lower("cuda", "collective", derive=derive, precision="mxfp8"))
    conversions = {"jax_mok_quantize", "jax_mok_dequantize", "jax_mok_round"}
    assert set(used) == {*COLLECTIVE_TARGETS, *conversions}


@with_gpu_kernels
@pytest.mark.parametrize("capability", ["8.0", "9.0", "10.0"])
def test_gpus_without_kernels_convert_to_mxfp8_in_plain_jax(capability, monkeypatch):
    device = types.SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(jax, "local_devices", lambda backend: [device])
    convert = jax.jit(lambda x: codec.rounded(x, -1, x.dtype, frozenset()))
    lowered = convert.trace(jnp.zeros((2, 32))).lower(lowering_platforms=("cuda",))
    assert ("jax_mok_round" in lowered.as_text()) == (capability == "9.0")


@with_peers
def test_the_collective_composition_lets_xla_order_calls(monkeypatch):
    """No rank waits in a call of its own for another one."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT")
    assert targets(lower("cuda", "collective")) == COLLECTIVE_TARGETS
    with pytest.raises(jax_mok.MoEError, match="might not meet in the same call"):
        lower("cuda", "fused")


@with_gpu_kernels
@pytest.mark.parametrize("ranks", [1, RANKS])
def test_collective_gradients_on_gpus_use_nothing_but_the_plan_and_the_sum(ranks):
    used = targets(lower("cuda", "collective", mesh_of(ranks), derive=True))
    assert set(used) == {"jax_mok_plan_of_gathered_routes", "jax_mok_weighted_sum"}


@with_peers
@pytest.mark.parametrize(
    ("composition", "target"),
    [("auto", "jax_mok_plan_peers"), ("collective", "jax_mok_plan_of_gathered_routes")],
)
def test_plans_on_gpus_meet_as_the_layer_does(composition, target):
    assert targets(lower_plan(composition, mesh_of(RANKS))) == [target]


def gpu_of(
    ordinal: int, process: int = 0, domain: int = 0, name: str = "partition_index"
) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        id=8 * process + ordinal,
        platform="gpu",
        local_hardware_id=ordinal,
        process_index=process,
        **{name: domain},
    )


@pytest.fixture
def pairs(monkeypatch) -> set[tuple[int, int]]:
    """Ordinals of GPUs that cannot reach each other, to be filled by a test."""
    cut: set[tuple[int, int]] = set()
    module = types.SimpleNamespace(can_reach=lambda device, peer: (device, peer) not in cut)
    monkeypatch.setattr(ffi, "cuda", module)
    return cut


def test_gpus_reach_each_other_if_every_pair_of_a_group_does(pairs):
    quad = np.array([[gpu_of(0), gpu_of(1)], [gpu_of(2), gpu_of(3)]])
    assert reach.out_of_reach(quad) is None
    pairs.add((1, 2))  # of different groups
    assert reach.out_of_reach(quad) is None
    pairs.add((3, 2))
    assert reach.out_of_reach(quad) == "0 not that of 1 (of devices 2-3)"
    pairs.add((0, 1))
    assert (
        reach.out_of_reach(quad) == "0 not that of 1 (of devices 0-1); and ranks in 1 more groups"
    )


@pytest.mark.parametrize("name", ["partition_index", "slice_index"])
def test_gpus_of_different_nvlink_domains_do_not_reach_each_other(pairs, name):
    split = np.array([[gpu_of(0, name=name), gpu_of(0, process=1, domain=1, name=name)]])
    assert reach.out_of_reach(split) == "0 not that of 1 (of devices 0, 8)"
    assert reach.out_of_reach(split.T) is None


def test_gpus_of_several_processes_of_a_domain_are_not_asked(pairs):
    """Their answers might differ between processes, and then so would the programs."""
    pairs.update({(0, 1), (1, 0)})
    mixed = np.array([[gpu_of(0), gpu_of(1)], [gpu_of(0, process=1), gpu_of(1, process=1)]])
    assert reach.out_of_reach(mixed) is None
    assert reach.out_of_reach(mixed[:1]) == "0 not that of 1 (of devices 0-1)"


def test_many_ranks_apart_are_named_in_short(pairs):
    racks = np.array([[gpu_of(rank % 8, rank // 8, domain=rank // 24) for rank in range(72)]])
    assert reach.out_of_reach(racks) == (
        "0-23 not that of 24-71; 24-47 not that of 48-71 (of devices 0-71)"
    )
    in_turns = np.array([[gpu_of(rank % 8, rank // 8, domain=rank % 2) for rank in range(72)]])
    assert reach.out_of_reach(in_turns) == (
        "0, 2, 4, 6 and 32 more not that of 1, 3, 5, 7 and 32 more (of devices 0-71)"
    )
    alone = np.array([[gpu_of(0, rank, domain=rank) for rank in range(8)]])
    assert reach.out_of_reach(alone) == (
        "0 not that of 1-7; 1 not that of 2-7; 2 not that of 3-7; 3 not that of 4-7; and 3 more "
        "such (of devices 0, 8, 16, 24 and 4 more)"
    )


def test_devices_that_are_no_gpus_are_not_asked(pairs):
    assert reach.out_of_reach(np.array([jax.devices()[:4]])) is None


def test_gpus_apart_choose_the_collective_composition_and_say_so_once(monkeypatch):
    asked, said = [], []

    def out_of_reach(groups: np.ndarray) -> str:
        asked.append([[device.id for device in group] for group in groups])
        return "0 not that of 1 (of devices 0, 2)"

    monkeypatch.setattr(reach, "out_of_reach", out_of_reach)
    monkeypatch.setattr(logging, "warning", lambda text, *args: said.append(text % args))
    call.warn_once.cache_clear()
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("ep", "dp"))
    for _ in range(2):
        assert targets(lower("cpu", "auto", mesh)) == COLLECTIVE_TARGETS
    assert asked == [[[0, 2], [1, 3]]] * 2
    assert len(said) == 1
    which = "of mesh axis 'ep' cannot reach each other's memory: 0 not that of 1 (of devices 0, 2)"
    assert which in said[0]
    for insisting in ("fused", "composed"):
        with pytest.raises(jax_mok.MoEInputError, match=re.escape(which)):
            lower("cpu", insisting, mesh)
    assert targets(lower("cpu", "collective", mesh)) == COLLECTIVE_TARGETS
    assert len(said) == 1
    # An abstract mesh has no devices to ask.
    layer = functools.partial(jax_mok.moe, mesh=mesh.abstract_mesh, axis_name="ep")
    jax.eval_shape(layer, *operands())
    assert len(asked) == 4
