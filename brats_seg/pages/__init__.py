"""Pages of cases, of many cases, of runs and of time points: read what they show, and write them."""
