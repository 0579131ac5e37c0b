"""The command line: modules with one or several commands, imported by ``main`` when a command is called."""
