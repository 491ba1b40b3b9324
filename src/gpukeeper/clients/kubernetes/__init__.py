"""One cluster: login, connections, requests, and the fields that are read of its objects."""
