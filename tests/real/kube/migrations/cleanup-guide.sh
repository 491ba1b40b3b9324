#!/bin/sh
# The commands of a cleanup guide for test runs: what succeeded in one namespace, and failed pods of all namespaces.
kubectl delete jobs --namespace "$NAMESPACE" --field-selector status.successful=1 "$@"
kubectl delete pods --namespace "$NAMESPACE" --field-selector status.phase=Succeeded "$@"
kubectl delete pods --all-namespaces --field-selector status.phase=Failed "$@"
