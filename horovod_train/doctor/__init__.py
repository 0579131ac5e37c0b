"""Is everything as a job needs it? Looks at hosts and at the network between them."""
