#!/bin/sh
# The script of a CronJob for TrainJobs, which have no TTL: finished ones of one namespace, an hour after their creation.
now=${NOW:-$(date +%s)}
kubectl get trainjobs --namespace "$NAMESPACE" -o jsonpath='{range .items[*]}{.metadata.name} {.metadata.creationTimestamp} {.status.conditions[?(@.status=="True")].type}{"\n"}{end}' |
    while read -r name created conditions; do
        case " $conditions " in
        *" Complete "* | *" Failed "*)
            [ $((now - $(date -d "$created" +%s))) -ge 3600 ] && kubectl delete trainjob "$name" --namespace "$NAMESPACE" "$@"
            ;;
        esac
    done
