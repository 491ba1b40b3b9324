"""Requests to hosts through the OpenSSH client: hosts.py: names of hosts; client.py: one request, one reply."""
