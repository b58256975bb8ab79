"""What a user is told: each message names what was given and what to do."""

import dataclasses
import functools
import importlib
import importlib.metadata
import subprocess
import sys
import time
import types

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import routings
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_mok
from jax_mok import faults
from jax_mok.versions import check_jax_version, package_version

RANKS, TOKENS, HIDDEN, INNER, EXPERTS, TOP_K = 4, 8, 16, 24, 8, 2


def operands() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    routes = routings.uniform(rng, RANKS, TOKENS, TOP_K, EXPERTS)
    inputs = harness.draw_inputs(rng, routes, hidden=HIDDEN, inner=INNER, experts=EXPERTS)
    named = inputs._asdict()
    del named["dy"]
    return named


def call(mesh=None, axis_name="ep", config=None, **changes):
    mesh = mesh or harness.mesh_of(RANKS)
    return jax_mok.moe(**operands() | changes, mesh=mesh, axis_name=axis_name, config=config)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"x": zeros(2, 16, HIDDEN)},
            r"x has shape \[2, 16, 16\]; .*\[T, H\]: fold its leading dimensions into the tokens",
        ),
        ({"x": zeros(32, HIDDEN, dtype=np.float16)}, "x has dtype float16.*float32 or bfloat16"),
        ({"x": zeros(31, HIDDEN)}, r"expert_ids has shape \[32, 2\]; \[31, 2\] fits"),
        ({"x": [[0.0]]}, "x must be an array, got list"),
        ({"x": zeros(32, 8)}, r"w_gate has shape \[8, 16, 24\]; \[8, 8, 24\] fits \(H as in x\)"),
        ({"expert_ids": zeros(32, 2)}, "expert_ids has dtype float32; it must be int32"),
        ({"expert_ids": zeros(32, dtype=np.int32)}, r"expert_ids has shape \[32\]; .*\[T, K\]"),
        ({"expert_ids": zeros(32, dtype=np.int32)}, r"for one choice use expert_ids\[:, None\]"),
        ({"expert_weights": zeros(32)}, r"for one choice use expert_weights\[:, None\]"),
        ({"expert_ids": zeros(32, 0, dtype=np.int32)}, "at least one choice"),
        ({"expert_weights": zeros(32, 3)}, r"expert_weights has shape \[32, 3\]; \[32, 2\] fits"),
        ({"expert_weights": zeros(32, 2, dtype=jnp.bfloat16)}, "bfloat16; it must be float32"),
        ({"w_gate": zeros(8, 24, 16)}, r"w_gate has shape \[8, 24, 16\]; \[8, 16, 16\] fits"),
        ({"w_up": zeros(8, 16, 25)}, r"w_up has shape \[8, 16, 25\]; \[8, 16, 24\] fits"),
        ({"w_down": zeros(8, 16, 24)}, r"w_down has shape \[8, 16, 24\]; \[8, 24, 16\] fits"),
        ({"w_down": zeros(8, 24, 16, dtype=jnp.bfloat16)}, "w_down has dtype bfloat16.*float32"),
        ({"w_gate": zeros(8, HIDDEN, 0)}, "must be at least 1"),
        ({"axis_name": "tp"}, "axis_name='tp' is not an axis of the mesh; its axes are 'ep'"),
    ],
)
def test_operands_that_do_not_fit_are_named(changes, message):
    with pytest.raises(jax_mok.MoEInputError, match=message):
        call(**changes)


def test_experts_that_the_axis_cannot_share_out():
    with pytest.raises(jax_mok.MoEInputError, match=r"8 experts .*3 ranks.*a multiple of 3"):
        call(mesh=harness.mesh_of(3), **{k: v[:30] for k, v in operands().items() if k[0] in "xe"})


def test_tokens_that_the_mesh_cannot_share_out():
    with pytest.raises(jax_mok.MoEInputError, match=r"30 tokens .*4 devices: pad x to 32 tokens"):
        call(**{k: v[:30] for k, v in operands().items() if k[0] in "xe"})


def test_more_rows_than_row_numbers():
    shapes = {
        "x": jax.ShapeDtypeStruct((2**30, 1), np.float32),
        "expert_ids": jax.ShapeDtypeStruct((2**30, 2), np.int32),
        "expert_weights": jax.ShapeDtypeStruct((2**30, 2), np.float32),
        "w_gate": jax.ShapeDtypeStruct((8, 1, 1), np.float32),
        "w_up": jax.ShapeDtypeStruct((8, 1, 1), np.float32),
        "w_down": jax.ShapeDtypeStruct((8, 1, 1), np.float32),
    }
    with pytest.raises(jax_mok.MoEInputError, match="split the batch into several calls"):
        jax.eval_shape(lambda named: call(**named), shapes)


def local_call(*args):
    names = ("x", "expert_ids", "expert_weights", "w_gate", "w_up", "w_down")
    return jax_mok.moe_ffn(**dict(zip(names, args, strict=True)), axis_name="ep")


def test_call_outside_shard_map():
    with pytest.raises(jax_mok.MoEInputError, match=r"outside jax.shard_map.*jax_mok.moe\("):
        jax.jit(local_call)(*operands().values())


def test_global_call_inside_shard_map():
    mesh = harness.mesh_of(RANKS)
    body = lambda *args: call(x=args[0])  # noqa: E731
    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    with pytest.raises(jax_mok.MoEInputError, match=r"inside jax.shard_map: call moe_ffn there"):
        mapped(*operands().values())


@pytest.mark.parametrize("value", [{}, "x", 0, False])
def test_config_of_another_type(value):
    with pytest.raises(jax_mok.MoEInputError, match="config must be a MoEConfig or None, got"):
        call(config=value)


@pytest.mark.parametrize("value", ["ep", 4])
def test_mesh_of_another_type(value):
    with pytest.raises(jax_mok.MoEInputError, match=r"mesh must be a jax.sharding.Mesh, got"):
        call(mesh=value)


@pytest.mark.parametrize("wrap", [lambda function: function, jax.jit])
def test_no_mesh_at_all(wrap):
    layer = functools.partial(jax_mok.moe, axis_name="ep")
    with pytest.raises(jax_mok.MoEInputError, match=r"mesh was not given, .*jax.set_mesh\(mesh\)"):
        wrap(layer)(**operands())


@pytest.mark.parametrize(
    ("name", "count", "message"),
    [
        (
            "x",
            1,
            r"x is committed to device .*0, not to the 4 of the mesh: .*\(x, .*\('ep'\)\)\)",
        ),
        ("w_up", 2, r"w_up is committed to 2 devices, .*jax.device_put\(w_up, NamedSharding\(mesh"),
    ],
)
def test_operands_committed_elsewhere(name, count, message):
    placed = jax.device_put(operands()[name], jax.NamedSharding(harness.mesh_of(count), P("ep")))
    with pytest.raises(jax_mok.MoEInputError, match=message):
        call(**{name: placed})


def test_constants_of_a_compiled_call_may_be_committed_anywhere():
    elsewhere = jax.device_put(operands()["w_up"], jax.devices()[5])
    y = jax.jit(lambda x: call(x=x, w_up=elsewhere))(operands()["x"])
    np.testing.assert_array_equal(y, call())


def test_unknown_axis_inside_shard_map():
    mesh = Mesh(np.array(jax.devices()[:4]), ("experts",))
    mapped = jax.shard_map(local_call, mesh=mesh, in_specs=P("experts"), out_specs=P("experts"))
    with pytest.raises(jax_mok.MoEInputError, match=r"'ep' is not a manual axis.*are 'experts'"):
        mapped(*operands().values())


def test_weights_that_every_rank_has():
    specs = (P("ep"), P("ep"), P("ep"), P(), P("ep"), P("ep"))
    named = operands()
    named["w_gate"] = named["w_gate"][: EXPERTS // RANKS]
    mapped = jax.shard_map(
        local_call, mesh=harness.mesh_of(RANKS), in_specs=specs, out_specs=P("ep")
    )
    with pytest.raises(jax_mok.MoEInputError, match=r"w_gate is the same on every rank.*in_specs="):
        mapped(*named.values())


def plan_of(ids, num_experts=EXPERTS):
    plan = functools.partial(jax_mok.build_plan, num_experts=num_experts, axis_name="ep")
    mesh = harness.mesh_of(RANKS)
    return jax.shard_map(plan, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))(ids)


def test_plans_name_what_does_not_fit():
    ids = operands()["expert_ids"]
    with pytest.raises(jax_mok.MoEInputError, match="build_plan was called outside"):
        jax_mok.build_plan(ids, num_experts=EXPERTS, axis_name="ep")
    with pytest.raises(jax_mok.MoEInputError, match="9 experts cannot be divided"):
        plan_of(ids, 9)
    np.testing.assert_array_equal(plan_of(ids, np.int64(EXPERTS)).rows, plan_of(ids).rows)
    with pytest.raises(jax_mok.MoEInputError, match=r"must be an integer, got 8\.0"):
        plan_of(ids, 8.0)
    with pytest.raises(jax_mok.MoEInputError, match="must be int32"):
        plan_of(ids.astype(np.int8))
    with pytest.raises(jax_mok.MoEError, match="fold the batch into the tokens"):
        jax.vmap(plan_of)(np.stack([ids, ids]))
    too_many = functools.partial(plan_of, num_experts=2**15)
    reason = r"without GPU kernels|GPU kernels need|32768 experts does not fit"
    with pytest.raises(jax_mok.MoEError, match=reason):
        jax.jit(too_many).trace(ids).lower(lowering_platforms=("cuda",))
    with pytest.raises(jax_mok.MoEError, match="CPU devices and on NVIDIA GPUs only"):
        jax.jit(plan_of).trace(ids).lower(lowering_platforms=("tpu",))


def test_axes_left_to_the_compiler():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("dp", "ep"))
    mapped = jax.shard_map(
        local_call, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), axis_names={"ep"}
    )
    with pytest.raises(jax_mok.MoEInputError, match=r"'dp' are not manual.*name all mesh axes"):
        jax.jit(mapped)(*operands().values())


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("ring_rows", 100, "ring_rows=100 must be None or an integer multiple of 64"),
        ("ring_rows", 0, "at least 64"),
        ("ring_rows", 2**31, "multiple of 64"),
        ("chunk_rows", 64.0, "chunk_rows=64.0"),
        ("saved_rows", -64, "at least 0"),
        ("saved_rows", True, "saved_rows=True"),
        ("dispatch", "steal", "dispatch='steal' must be one of pull, push"),
        ("combine", None, "combine=None"),
        ("reverse_combine", "PULL", "one of pull, push"),
        ("reverse_dispatch", 1, "one of pull, push"),
        ("composition", "fast", "one of auto, fused, composed, collective"),
        ("clamp", 0.0, "clamp=0.0 must be a positive finite number"),
        ("clamp", float("nan"), "positive finite"),
        ("timeout_s", -1, "timeout_s=-1"),
        ("timeout_s", float("inf"), "positive finite"),
        ("timeout_s", "3", "timeout_s='3'"),
        ("timeout_s", 1e10, "at most 86400"),
        ("timeout_s", 10**400, "positive finite"),
        ("clamp", 1e300, "at most 3.4"),
        ("combine", np.array(["pull", "push"]), "one of pull, push"),
    ],
)
def test_config_values_out_of_range(field, value, message):
    with pytest.raises(jax_mok.MoEInputError, match=message):
        jax_mok.MoEConfig(**{field: value})


def test_ring_that_is_no_multiple_of_its_chunks():
    with pytest.raises(jax_mok.MoEInputError, match="round it up to 256"):
        jax_mok.MoEConfig(ring_rows=192, chunk_rows=128)


def test_numpy_numbers_are_numbers():
    config = jax_mok.MoEConfig(ring_rows=np.int64(128), clamp=np.float32(7.0), timeout_s=30)
    assert config == jax_mok.MoEConfig(ring_rows=128, clamp=7.0, timeout_s=30.0)
    assert type(config.ring_rows) is int


def test_config_is_hashable_and_immutable():
    assert hash(jax_mok.MoEConfig()) == hash(jax_mok.MoEConfig())
    with pytest.raises(dataclasses.FrozenInstanceError):
        jax_mok.MoEConfig().clamp = 1.0


@pytest.mark.parametrize("composition", ["composed", "collective"])
def test_ids_out_of_range_are_masked_counted_and_reported(composition):
    config = jax_mok.MoEConfig(composition=composition)
    wild = operands()["expert_ids"].copy()
    wild[0, 0], wild[9, 1], wild[10, 0] = EXPERTS, -2, 2**31 - 1
    masked = np.where((wild < 0) | (wild >= EXPERTS), np.int32(-1), wild)
    y = jax.block_until_ready(call(expert_ids=wild, config=config))
    with pytest.raises(jax_mok.MoEInputError) as error:
        jax_mok.check()
    assert "rank 0 had 1 expert id(s) outside 0..7" in str(error.value)
    assert "rank 1 had 2 expert id(s)" in str(error.value)
    np.testing.assert_array_equal(y, call(expert_ids=masked, config=config))
    jax_mok.check()

    plan = jax.shard_map(
        lambda ids: jax_mok.build_plan(ids, num_experts=EXPERTS, axis_name="ep", config=config),
        mesh=harness.mesh_of(RANKS),
        in_specs=P("ep"),
        out_specs=P("ep"),
    )
    counts = np.asarray(plan(wild).counts).reshape(RANKS, -1)
    assert counts[:, 4].tolist() == [1, 2, 0, 0]
    with pytest.raises(jax_mok.MoEInputError):
        jax_mok.check()


def test_a_recorded_fault_is_raised_by_the_next_call():
    wild = operands()["expert_ids"].copy()
    wild[0, 0] = EXPERTS
    jax.block_until_ready(call(expert_ids=wild))
    with pytest.raises(jax_mok.MoEInputError, match="outside"):
        call()
    call()


def test_ranks_with_the_same_fault_share_a_line():
    wild = np.full_like(operands()["expert_ids"], EXPERTS)
    jax.block_until_ready(call(expert_ids=wild))
    with pytest.raises(jax_mok.MoEInputError) as error:
        jax_mok.check()
    assert str(error.value).startswith("ranks 0-3 each had 16 expert id(s) outside 0..7; they were")
    assert "\n" not in str(error.value)


def test_lines_shared_by_some_ranks_name_these(monkeypatch):
    def out_of_range(rank, group, device, seen=1):
        fault = dict(kind="expert_out_of_range", operation="plan", peer=-1, expected=EXPERTS)
        return fault | dict(rank=rank, group=group, device=device, seen=seen)

    recorded = [
        *(out_of_range(rank, 1, -1) for rank in (0, 1, 2, 5)),
        *(out_of_range(rank, 1, -1) for rank in (7, 7)),
        out_of_range(6, 1, -1, seen=3),
        *(out_of_range(-1, 0, device) for device in (0, 1)),
    ]
    gpus = types.SimpleNamespace(take_faults=lambda: recorded)
    monkeypatch.setattr(faults.ffi, "cuda", gpus)
    with pytest.raises(jax_mok.MoEInputError) as error:
        jax_mok.check()
    lines = str(error.value).splitlines()
    assert [line.split(" had ")[0] for line in lines] == [
        "ranks 0-2, 5 of group 1 each",
        "rank 7 of group 1",
        "rank 6 of group 1",
        "GPUs 0-1 each",
    ]
    assert [line.endswith(", 2 times") for line in lines] == [False, True, False, False]


def test_many_faults_are_told_briefly():
    step = jax.jit(lambda ids: call(expert_ids=ids))
    wild = np.full_like(operands()["expert_ids"], EXPERTS)
    for turn in range(100):
        wild.flat[:turn] = 0
        jax.block_until_ready(step(wild))
    with pytest.raises(jax_mok.MoEInputError) as error:
        jax_mok.check()
    text = str(error.value)
    assert "times" in text
    assert "more faults" in text
    assert len(text) < 2000
    jax_mok.check()


def test_a_rank_that_does_not_come_is_named_within_the_time_out():
    config = jax_mok.MoEConfig(timeout_s=1.0)

    def body(*args):
        def come(x, *rest):
            return jax_mok.moe_ffn(x, *rest, axis_name="ep", config=config)

        return jax.lax.cond(jax.lax.axis_index("ep") == 2, lambda x, *_: x, come, *args)

    step = jax.jit(
        jax.shard_map(
            body,
            mesh=harness.mesh_of(RANKS),
            in_specs=P("ep"),
            out_specs=P("ep"),
            check_vma=False,
        )
    )
    start = time.monotonic()
    told = r"plan waited 1 s for rank 2 of 4; 3 came\. .*: is it in one branch of a lax.cond, or in"
    with pytest.raises(jax.errors.JaxRuntimeError, match=told):
        jax.block_until_ready(step(*operands().values()))
    assert time.monotonic() - start < 60
    with pytest.raises(jax_mok.MoETimeoutError, match="waited for rank 2; 3 of 4 ranks came"):
        jax_mok.check()
    call(config=config)


def test_a_time_out_within_a_gpu_kernel_says_what_to_do(monkeypatch):
    fault = dict(
        kind="kernel_timeout",
        operation="kernel",
        group=0,
        rank=-1,
        peer=-1,
        expected=0,
        seen=2,
        device=3,
    )
    recorded = types.SimpleNamespace(take_faults=lambda: [fault])
    monkeypatch.setattr(faults.ffi, "cuda", recorded)
    message = (
        r"kernel on GPU 3 expired in 2 call.*MoEConfig\.timeout_s .* raise it; .* report a bug"
    )
    with pytest.raises(jax_mok.MoETimeoutError, match=message):
        jax_mok.check()


def test_ranks_that_make_different_calls_are_named(monkeypatch):
    fault = dict(
        kind="other_call",
        operation="meeting",
        group=0,
        rank=1,
        peer=0,
        expected=7,
        seen=7,
        device=0,
    )
    recorded = types.SimpleNamespace(take_faults=lambda: [fault])
    monkeypatch.setattr(faults.ffi, "cuda", recorded)
    message = (
        "rank 1 came to a call, and rank 0 to one of other .*: epoch 7, seen 7; .* same program"
    )
    with pytest.raises(jax_mok.MoEError, match=message) as raised:
        jax_mok.check()
    assert not isinstance(raised.value, (jax_mok.MoETimeoutError, jax_mok.MoEInputError))


@pytest.mark.parametrize("version", [(0, 10, 1), (0, 9, 0), (0, 13, 0), (1, 0, 0)])
def test_unsupported_jax_versions_are_refused(version):
    with pytest.raises(ImportError, match=r"JAX 0.10.2 up to 0.12, found .*pip install"):
        check_jax_version(version)


@pytest.mark.parametrize("version", [(0, 10, 2), (0, 11, 2), (0, 12, 9)])
def test_supported_jax_versions_are_accepted(version):
    check_jax_version(version)


def test_import_alone_gives_router_quantize_and_version():
    code = "import jax_mok; print(jax_mok.router.Router(2), jax_mok.quantize.BLOCK)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.startswith("Router(top_k=2")
    assert set(jax_mok.__all__) >= {"router", "quantize", "__version__"}


def test_the_version_is_that_of_the_installed_package(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"1.2.3 of {name}")
    assert package_version() == "1.2.3 of jax_mok"

    def not_installed(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", not_installed)
    assert package_version() == "0+unknown"


@pytest.mark.parametrize(("module", "needs"), [("flax", "flax"), ("equinox", "equinox")])
def test_a_module_without_its_library_names_the_extra(module, needs, monkeypatch):
    monkeypatch.setitem(sys.modules, needs, None)
    monkeypatch.delitem(sys.modules, f"jax_mok.{module}", raising=False)
    with pytest.raises(ImportError, match=f"install the package with its extra `{needs}`"):
        importlib.import_module(f"jax_mok.{module}")
