"""What went wrong on an actor is told in a sentence, without the trace that Ray sends along."""

from ray.exceptions import RayTaskError

from orchestrator.running.driver import describe
from orchestrator.running.trainable import sentence
from orchestrator.store.errors import StoreError


def test_an_error_of_another_actor_is_its_cause() -> None:
    full = StoreError("cannot write rows in results/s: No space left on device")
    sent = RayTaskError("append", "Traceback (most recent call last): …", full)
    arrived = sent.as_instanceof_cause()
    assert isinstance(arrived, StoreError)
    assert str(arrived) != str(full)
    assert sentence(arrived) == sentence(full) == str(full)
    assert describe(sent) == f"StoreError: {full}"
