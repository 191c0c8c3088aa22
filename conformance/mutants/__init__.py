"""Faulty variants of the reference implementation, and the proof that the suite catches them.

Knows the reference only as a folder of source files found by its import name.
"""
