"""Telling people: terminals now; chat and mail come later."""
