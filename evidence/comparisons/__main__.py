"""The command `python -m evidence.comparisons NAME`, which runs.py describes."""
import sys

from evidence.comparisons import runs

if __name__ == "__main__":
    try:
        runs.main()
    except KeyboardInterrupt:
        sys.exit("\nStopped. Run the same command again to continue. Unfinished runs are repeated.")
