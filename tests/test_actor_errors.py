"""An error on an actor becomes one sentence, without the traceback that Ray attaches."""

from ray.exceptions import RayActorError, RayTaskError

from orchestrator.running.driver import _failed_before_setup, describe_failure
from orchestrator.running.trainable import error_message
from orchestrator.store import StoreError


def test_an_error_of_another_actor_is_its_cause() -> None:
    full = StoreError("cannot write rows in results/s: No space left on device")
    sent = RayTaskError("append", "Traceback (most recent call last): …", full)
    arrived = sent.as_instanceof_cause()
    assert isinstance(arrived, StoreError)
    assert str(arrived) != str(full)
    assert error_message(arrived) == error_message(full) == str(full)
    assert describe_failure(sent) == f"StoreError: {full}"


def test_an_actor_that_could_not_import_the_project_is_its_nodes_fault() -> None:
    lines = ["The actor died unexpectedly.", "\tip: 10.0.0.3", "The actor is dead. Traceback (most recent call last):"]
    error = RayActorError(error_msg="\n".join([*lines, "ModuleNotFoundError: No module named 'orchestrator'"]))
    nodes = [
        {"NodeID": name, "NodeManagerHostname": name, "NodeManagerAddress": address}
        for name, address in (("good", "10.0.0.2"), ("bad", "10.0.0.3"))
    ]
    failure = _failed_before_setup(error, nodes)
    assert failure is not None
    assert (failure.node.host, failure.reason) == ("bad", "ModuleNotFoundError: No module named 'orchestrator'")
    assert _failed_before_setup(error, nodes[:1]) is None
    assert _failed_before_setup(ValueError("ip: 10.0.0.3"), nodes) is None
