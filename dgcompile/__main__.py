"""``python -m dgcompile`` is the same as ``dgcompile``."""

from dgcompile.cli import main

if __name__ == "__main__":
    main()
