"""The bundled model: its files, and the program that trained it. Knows nothing of tasks; `--model tiny` names it."""

BUNDLED_MODEL = "tiny"
