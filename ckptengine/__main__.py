"""`python -m ckptengine`: the command line tool, where its script is not on the path."""

from ckptengine.cli import main

if __name__ == "__main__":
    main()
