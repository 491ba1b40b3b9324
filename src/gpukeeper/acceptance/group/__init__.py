"""Several nodes as one run: who is a member, one probe over all of them, one process per rank."""
