"""Acceptance runs on a Kubernetes cluster: manifests of each form, the launcher, the state of its nodes."""
