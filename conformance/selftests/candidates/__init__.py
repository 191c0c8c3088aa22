"""Small candidates, each an adapter of one file with one known fault or bad habit."""
