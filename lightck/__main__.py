"""``python -m lightck``: the same as the ``lightck`` command."""

from lightck.cli import main

if __name__ == "__main__":
    main(prog_name="lightck")
