"""Generates the bundled documents (`--data bundled`) and the lines the bundled model is trained on."""
