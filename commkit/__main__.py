"""`python -m commkit` is `commkit`."""

from commkit.cli import main

if __name__ == "__main__":
    main(prog_name="commkit")
