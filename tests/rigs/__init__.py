"""Hosts made of namespaces, and what happens to runs on them: chaos and soak."""
