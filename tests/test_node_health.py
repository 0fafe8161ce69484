"""A node that cannot set up workers is reported, then excluded; the sweep ends only if no node is left."""

import pytest

from orchestrator.running.result_actor import FailedSetup, Node, WorkerFailure
from orchestrator.running.scheduling import MAX_FAILED_SETUPS, NodeHealth
from orchestrator.running.stop import Aborted

A, B, C = (Node(node_id=name * 3, host=f"node-{name}") for name in "abc")
NONE = WorkerFailure(alive=0, successful_setups={})
ONE_ALIVE = WorkerFailure(alive=1, successful_setups={B.node_id: 1})


def failure(node: Node, reason: str = "OSError: disk full", *, is_input_error: bool = False) -> FailedSetup:
    return FailedSetup(node=node, reason=reason, is_input_error=is_input_error)


def ids(*nodes: Node) -> set[str]:
    return {node.node_id for node in nodes}


def test_one_warning_for_a_reason_then_the_node_is_excluded() -> None:
    health = NodeHealth()
    notices = [health.record(failure(A), ONE_ALIVE, ids(A, B)) for _ in range(MAX_FAILED_SETUPS)]
    assert notices[0] == ["warning: node node-a could not set up a worker: OSError: disk full"]
    assert notices[1:-1] == [[]] * (MAX_FAILED_SETUPS - 2)
    assert notices[-1] == [f"node node-a is not used again in this run: {MAX_FAILED_SETUPS} set-ups failed in a row"]
    assert health.excluded == ids(A)


def test_a_successful_set_up_resets_the_count() -> None:
    health = NodeHealth()
    for _ in range(MAX_FAILED_SETUPS - 1):
        health.record(failure(A), ONE_ALIVE, ids(A, B))
    set_up_since = WorkerFailure(alive=2, successful_setups={A.node_id: 1, B.node_id: 1})
    for _ in range(MAX_FAILED_SETUPS - 1):
        health.record(failure(A), set_up_since, ids(A, B))
        assert not health.excluded
    health.record(failure(A), set_up_since, ids(A, B))
    assert health.excluded == ids(A)


def test_all_nodes_bad_ends_the_sweep_with_each_reason_once() -> None:
    health = NodeHealth()
    for _ in range(MAX_FAILED_SETUPS):
        health.record(failure(A), NONE, ids(A, B, C))
        health.record(failure(B), NONE, ids(A, B, C))
    for _ in range(MAX_FAILED_SETUPS - 1):
        health.record(failure(C, "ImportError: no torch"), NONE, ids(A, B, C))
    with pytest.raises(Aborted) as aborted:
        health.record(failure(C, "ImportError: no torch"), NONE, ids(A, B, C))
    assert aborted.value.sentences == (
        "no worker could be set up on nodes node-a, node-b: OSError: disk full",
        "no worker could be set up on node node-c: ImportError: no torch",
    )


def test_a_live_worker_keeps_the_sweep_going_until_it_dies() -> None:
    health = NodeHealth()
    for node in (A, B):
        for _ in range(MAX_FAILED_SETUPS):
            health.record(failure(node), ONE_ALIVE, ids(A, B))
    health.check(ONE_ALIVE, ids(A, B))
    health.check(NONE, ids(A, B, C))
    health.check(NONE, ())  # a cluster that has lost all its nodes may get new ones
    with pytest.raises(Aborted):
        health.check(NONE, ids(A, B))


def test_an_input_error_needs_a_second_node_that_has_it_too() -> None:
    health = NodeHealth()
    health.record(failure(A, "no such model", is_input_error=True), NONE, ids(A, B))
    health.record(failure(A, "no such model", is_input_error=True), NONE, ids(A, B))
    health.record(failure(B, "other data", is_input_error=True), NONE, ids(A, B))
    with pytest.raises(Aborted, match=r"^no such model$"):
        health.record(failure(B, "no such model", is_input_error=True), NONE, ids(A, B))


def test_an_input_error_ends_the_sweep_at_once_on_the_only_node() -> None:
    with pytest.raises(Aborted, match=r"^no such model$"):
        NodeHealth().record(failure(A, "no such model", is_input_error=True), NONE, ids(A))


def test_an_input_error_is_the_nodes_where_other_workers_decode() -> None:
    health = NodeHealth()
    for node in (A, C):
        health.record(failure(node, "no such model", is_input_error=True), ONE_ALIVE, ids(A, B, C))
    assert not health.excluded
