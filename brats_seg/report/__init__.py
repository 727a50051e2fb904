"""Pictures of cases, scores and cohorts: plain values in, a figure out."""
