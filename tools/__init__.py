"""Programs for maintainers, run from a checkout: `python -m tools.NAME`. Not part of the installed package."""
