"""Starts acceptance runs on many nodes: ssh, Docker, Ray, Kubernetes. One engine, one file or directory."""
