"""Run every benchmark, each in a process of its own: ``python -m benchmarks [NAME ...]``."""

import subprocess
import sys

NAMES = (
    "kernels",
    "cnn",
    "threads",
    "overhead",
    "users",
    "stores",
    "profile",
    "methods",
    "speed",
    "faults",
    "fault_budget",
    "dp_audit",
    "secure",
    "own_models",
    "own_clock",
    "attacks",
    "many_adapters",
    "many_users",
    "tables",
    "judging",
)


def main() -> int:
    """Return 0 if every claim holds."""
    failed = []
    for name in sys.argv[1:] or NAMES:
        print(f"{name} ...", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"]).returncode:
            failed.append(name)
    print(f"claims that failed: {', '.join(failed)}" if failed else "every claim holds")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
