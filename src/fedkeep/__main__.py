"""``python -m fedkeep``: the command ``fedkeep``, where it is not on the path."""

from fedkeep_command import main

main()
