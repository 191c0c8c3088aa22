"""The pytest plugin: options, the candidate's fixture, selection, isolation, verdicts.

``plugin.options`` is what pytest loads (entry point ``conformance``); it imports the rest, and
torch, only where tests are to be run against a candidate.
"""
