"""The command line: `reuse-sweep` and its sub-commands. Modules here import torch and Ray only inside commands."""
