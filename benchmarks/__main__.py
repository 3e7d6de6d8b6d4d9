"""Run every benchmark, each in a process of its own: ``python -m benchmarks``."""

import subprocess
import sys

NAMES = ("kernels", "overhead", "users")


def main() -> int:
    """Return 0 if every claim holds."""
    failed = [
        name for name in NAMES if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"]).returncode
    ]
    print(f"claims that failed: {', '.join(failed)}" if failed else "every claim holds")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
