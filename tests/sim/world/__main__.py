"""`python -m tests.sim.world`."""

import sys

from tests.sim.world.play import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
