"""Small task sets written for the bundled model: generated documents, laid out like the Hub, and their generator."""
