"""Generates the bundled documents (`--data bundled`) and the lines that the bundled model is trained on."""
