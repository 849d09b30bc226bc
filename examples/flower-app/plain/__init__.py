"""The same app without protection, to see what differs."""
