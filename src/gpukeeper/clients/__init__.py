"""Requests to what runs elsewhere: no policy and no decisions."""
