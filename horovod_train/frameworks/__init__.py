"""One package per framework: the only places that import them."""
