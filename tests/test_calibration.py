"""The speed of the moment: how many samples, when, and of what."""

import pytest

from orchestrator.running.worker import CALIBRATION_PARTS, MIN_REST_FACTOR, Calibrator


class Machine:
    """A clock, and documents that take a second each at full speed and give 10, 20, … tokens."""

    def __init__(self) -> None:
        self.now, self.slowness, self.parts = 0.0, 1.0, []  # type: ignore[var-annotated]

    def decode(self, part: int) -> int:
        self.parts.append(part)
        self.now += self.slowness
        return 10 * (part + 1)


def test_the_first_trial_waits_for_all_samples_the_next_for_none() -> None:
    machine = Machine()
    calibrator = Calibrator(machine.decode, clock=lambda: machine.now)
    first, speed = calibrator.before_trial(), calibrator.speed
    second = calibrator.before_trial()
    assert (first, second) == (CALIBRATION_PARTS, 0)
    machine.now += MIN_REST_FACTOR + 1
    third = calibrator.before_trial()
    assert third == 1, "enough time has passed"
    assert speed == calibrator.speed == 25, "each part counts as often as the others"
    assert machine.parts == [*range(CALIBRATION_PARTS), 0]


@pytest.mark.parametrize("documents", [1, 10, 1000])
def test_calibration_takes_a_hundredth_of_the_time_however_short_trials_are(documents: int) -> None:
    machine = Machine()
    calibrator = Calibrator(machine.decode, clock=lambda: machine.now)
    calibrator.before_trial()
    for _ in range(10_000 // documents):
        calibrator.before_trial()
        for _ in calibrator.during(range(documents)):
            machine.now += 1.0
    samples = len(machine.parts) - CALIBRATION_PARTS
    assert 0.9 < samples / (machine.now / (MIN_REST_FACTOR + 1)) <= 1


def test_a_machine_that_slows_down_is_followed() -> None:
    machine = Machine()
    calibrator = Calibrator(machine.decode, clock=lambda: machine.now)
    calibrator.before_trial()
    machine.slowness = 2.0
    speeds = []
    for _ in range(CALIBRATION_PARTS):
        machine.now += 1000
        calibrator.before_trial()
        speeds.append(calibrator.speed)
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[-1] == 12.5


@pytest.mark.parametrize(("apart", "samples"), [(0.0, 1000 // (MIN_REST_FACTOR + 1)), (300.0, 3), (2000.0, 0)])
def test_samples_within_a_trial_rest_in_between_and_are_accounted_for(apart: float, samples: int) -> None:
    machine = Machine()
    calibrator = Calibrator(machine.decode, min_interval=apart, clock=lambda: machine.now)
    calibrator.before_trial()
    decoded = []

    def results() -> object:
        for number in range(1000):
            machine.now += 1.0
            yield number

    for result in calibrator.during(results()):  # type: ignore[arg-type]
        decoded.append(result)
    assert decoded == list(range(1000))
    assert abs(len(machine.parts) - CALIBRATION_PARTS - samples) <= 1
    assert calibrator.seconds_within_trial == len(machine.parts) - CALIBRATION_PARTS
    calibrator.before_trial()
    assert calibrator.seconds_within_trial == 0


def test_a_trial_without_calibration_has_none_within() -> None:
    machine = Machine()
    calibrator = Calibrator(machine.decode, clock=lambda: machine.now)
    assert list(calibrator.during([1, 2])) == [1, 2]
    assert machine.parts == []
