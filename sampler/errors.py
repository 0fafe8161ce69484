"""The one error a person can cause. Anything else that is raised is a fault of this project."""


class InputError(ValueError):
    """What was typed or given is wrong; the message is one sentence that names the value and what is allowed."""
