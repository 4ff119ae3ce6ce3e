"""From text to values, for every face."""
