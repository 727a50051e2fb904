"""Pages of cases, of many cases, and of runs: read what they show, and write them."""
