"""What opens gated models and data, carried from the environment of the command into that of its workers.

Workers on other machines do not have the command's environment. Ray could set it, but writes it into its logs; so it
goes the way of a worker's settings, through memory alone, and nothing prints it.
"""

import os
from dataclasses import dataclass, field

NAMES = ("HF_TOKEN",)


@dataclass(frozen=True, slots=True)
class Access:
    """Variables by name, without those that are not set."""

    variables: dict[str, str] = field(repr=False)

    @classmethod
    def of_this_process(cls) -> "Access":
        return cls({name: os.environ[name] for name in NAMES if os.environ.get(name)})

    def grant(self) -> None:
        """To this process; what the node has of its own stays where the command had nothing."""
        os.environ.update(self.variables)
