"""Directions that were measured: what is recommended, kept, and taken by `MoEConfig.auto`."""

import jax
import pytest

from jax_mok import MoEConfig, directions
from jax_mok.bench.link import recommend

KIND = "cpu"  # of the devices that tests have
PUSHED = dict.fromkeys(directions.MOVES, "push")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_without_a_measurement_auto_is_the_default():
    assert MoEConfig.auto() == MoEConfig()
    assert MoEConfig.auto(clamp=7.0) == MoEConfig(clamp=7.0)


def test_what_is_kept_is_what_auto_takes():
    assert jax.devices()[0].device_kind == KIND
    directions.remember("another kind", dict.fromkeys(directions.MOVES, "pull"))
    path = directions.remember(KIND, PUSHED)
    assert path == directions.cache_path()
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert MoEConfig.auto() == MoEConfig(**PUSHED)
    assert MoEConfig.auto(combine="pull") == MoEConfig(**PUSHED | {"combine": "pull"})
    assert directions.recall("another kind")["combine"] == "pull"


@pytest.mark.parametrize(
    "content",
    ["", "[]", "3", '{"cpu": 1}', '{"cpu": {"dispatch": "push"}}', '{"cpu": {"dispatch": []}}'],
)
def test_a_file_that_is_not_understood_changes_nothing(content):
    path = directions.cache_path()
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert MoEConfig.auto() == MoEConfig()
    directions.remember(KIND, PUSHED)
    assert MoEConfig.auto() == MoEConfig(**PUSHED)


def times(median: float, spread: float = 0.0) -> dict[str, float]:
    return {"median": median, "low": median - spread, "high": median + spread}


def test_a_move_is_turned_round_if_that_gains_more_than_the_scatter():
    defaults = {move: getattr(MoEConfig(), move) for move in directions.MOVES}
    equal = dict.fromkeys(("default", *directions.MOVES), times(1.0))
    assert recommend({"a": equal}) == defaults
    assert recommend({"a": equal | {"combine": times(0.995)}}) == defaults
    faster = equal | {"combine": times(0.9)}
    assert recommend({"a": faster}) == defaults | {"combine": "pull"}
    assert recommend({"a": equal | {"combine": times(0.9, 0.2)}}) == defaults
    assert recommend({"a": faster, "b": equal, "c": equal}) == defaults
    assert recommend({"a": faster, "b": faster, "c": equal}) == defaults | {"combine": "pull"}
