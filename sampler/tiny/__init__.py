"""The files of the bundled model, which `--model tiny` selects. `tools/tiny` trains it."""

BUNDLED_MODEL = "tiny"
