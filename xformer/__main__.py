"""`python -m xformer` is the console command `xformer`."""

from xformer.commands.main import main

if __name__ == "__main__":
    main()
