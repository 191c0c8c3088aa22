"""The part that needs a CUDA device; nothing is here yet."""
