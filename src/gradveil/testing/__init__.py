"""The contract suites, importable by anyone who writes a method."""
