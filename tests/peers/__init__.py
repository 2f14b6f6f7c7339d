"""What other tools understand, read from their source: names and defaults, for `kubetune import` to be held against."""
