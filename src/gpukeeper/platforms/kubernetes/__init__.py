"""Kubernetes clusters: pods, Jobs, TrainJobs, Ray objects and sets, by their root objects."""
