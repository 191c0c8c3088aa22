"""``python -m conformance``: the ``checkpoint-conformance`` command."""

from conformance.cli import main

if __name__ == "__main__":
    main()
