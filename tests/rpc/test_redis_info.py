"""Which Redis is fit to keep the state of a cluster, by its INFO."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.rpc import FailedPrecondition, Unavailable
from troupe.rpc.redis import full, risks, unfitness

FIT = {
    "redis_version": "7.2.4",
    "role": "master",
    "cluster_enabled": "0",
    "maxmemory": "0",
    "maxmemory_policy": "noeviction",
    "evicted_keys": "0",
    "aof_enabled": "1",
}
EVICTING = [
    f"{keys}-{order}" for keys in ("allkeys", "volatile") for order in ("lru", "lfu", "random")
] + ["volatile-ttl"]


def test_a_durable_redis_is_fit() -> None:
    assert unfitness(FIT, "h:1") is None
    assert risks(FIT) == []


def test_a_managed_redis_that_hides_fields_is_fit() -> None:
    assert unfitness({"redis_version": "6.2.0"}, "h:1") is None
    assert risks({"redis_version": "6.2.0"}) == []


@given(st.sampled_from(EVICTING), st.integers(1, 2**50))
def test_an_evicting_policy_with_a_limit_is_refused(policy: str, limit: int) -> None:
    error = unfitness({**FIT, "maxmemory": str(limit), "maxmemory_policy": policy}, "h:1")
    assert isinstance(error, FailedPrecondition)
    assert (error.field, error.value) == ("maxmemory-policy", policy)
    assert "CONFIG SET maxmemory-policy noeviction" in str(error)


@pytest.mark.parametrize("policy", EVICTING)
def test_an_evicting_policy_without_a_limit_is_a_risk(policy: str) -> None:
    info = {**FIT, "maxmemory_policy": policy}
    assert unfitness(info, "h:1") is None
    [risk] = risks(info)
    assert policy in risk
    assert "maxmemory is 0" in risk


def test_keys_that_were_deleted_before_the_policy_was_mended_are_told() -> None:
    [risk] = risks({**FIT, "evicted_keys": "1234"})
    assert "1,234 keys" in risk


def test_a_redis_without_an_append_only_file_is_a_risk() -> None:
    [risk] = risks({**FIT, "aof_enabled": "0"})
    assert "appendonly yes" in risk


@pytest.mark.parametrize("version", ["2.8.1", "5.0.14", "6.0.16"])
def test_an_old_redis_is_refused(version: str) -> None:
    error = unfitness({**FIT, "redis_version": version}, "h:1")
    assert isinstance(error, FailedPrecondition)
    assert error.value == version
    assert "6.2" in str(error)


def test_a_replica_may_be_promoted() -> None:
    replica = {**FIT, "role": "slave", "master_host": "p", "master_port": "6379"}
    error = unfitness(replica, "h:1")
    assert isinstance(error, Unavailable)
    assert "p:6379" in str(error)
    assert unfitness({**replica, "slave_read_only": "0"}, "h:1") is None


def test_a_node_of_a_cluster_needs_a_url_of_a_cluster() -> None:
    node = {**FIT, "cluster_enabled": "1"}
    error = unfitness(node, "h:1")
    assert isinstance(error, FailedPrecondition)
    assert "redis-cluster://" in str(error)
    assert unfitness(node, "h:1", clustered=True) is None


def test_a_full_redis_names_what_it_uses_and_its_limit() -> None:
    error = full("h:1", {**FIT, "used_memory": str(3 << 20), "maxmemory": str(2 << 20)})
    assert "3.0 MiB of 2.0 MiB" in str(error)
    assert error.field == "maxmemory"
    assert error.retry_after_ms is not None
    assert "maxmemory" in str(full("h:1", None))
