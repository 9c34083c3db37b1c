"""The command line, `python -m flashq`: info, selftest, demo."""
