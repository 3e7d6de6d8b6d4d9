"""``python -m fedkeep.cli``: the command where its script isn't on the path."""

from fedkeep.cli.app import main

if __name__ == "__main__":
    main()
