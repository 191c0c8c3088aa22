"""Run documents: written, read back, rendered."""
