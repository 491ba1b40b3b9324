"""The fleet's copy in PostgreSQL: ships the ledger, takes requests. Never an authority; the ledger stays local.

psycopg is imported only when a fleet database is configured (extra `postgres`).
"""
