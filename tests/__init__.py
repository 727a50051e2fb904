"""One thread in the processes of the tests, and in those that they start.

Importing this package says so to the libraries that are loaded after it. Sums in another order differ in
their last bits, and test processes share the cores.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
