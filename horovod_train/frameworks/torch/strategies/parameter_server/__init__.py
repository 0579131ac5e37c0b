"""Strategy ``parameter_server``: asynchronous training with parameter servers."""
