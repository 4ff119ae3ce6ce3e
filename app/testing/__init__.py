"""`reknit.testing`: histories of simulated clusters, and the checks that look at them."""
