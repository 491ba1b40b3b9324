#!/usr/bin/env bash
# Builds the Kubernetes control plane and the controllers that the tests run, once, from the exact versions in pins.txt.
# They stay outside the repository, in a folder named after the pins; what is there is not built again.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
pins=$here/pins.txt
cache=${GPUKEEPER_KUBE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/gpukeeper/kube}/$(sha256sum "$pins" | cut -c1-12)

mkdir -p "$cache/bin" "$cache/crds"
exec 9>"$cache/lock"
flock 9 # two at once would do the same work twice
rm -rf "$cache"/work.* # of a run that was killed
work=$(mktemp -d "$cache/work.XXXXXX")
trap 'rm -rf "$work"' EXIT
export CGO_ENABLED=0

# Some modules replace others by folders that a published module does not carry: these are built from a module of our own.
wrapped() { # module version
    local folder=$work/wrap/${1//\//_} source
    if [[ ! -d $folder ]]; then
        source=$(fetched "$1" "$2") || return
        mkdir -p "$folder"
        {
            printf 'module wrap\n\n%s\n\nrequire %s %s\n' "$(grep -m1 '^go ' "$source/go.mod")" "$1" "$2"
            # A staging folder of Kubernetes 1.x.y is published as v0.x.y.
            sed -nE "s#^[[:space:]]*(replace )?([^ ]+) => \./staging/.*#replace \2 => \2 v0.${2#v1.}#p" "$source/go.mod"
        } >"$folder/go.mod"
    fi
    echo "$folder"
}

fetched() { # module version: the folder of its source
    local said
    if ! said=$(cd "$work" && go mod download -json "$1@$2"); then
        echo "cannot download $1 $2: $(sed -n 's/.*"Error": //p' <<<"$said"). Look at 'go env GOPROXY'" >&2
        return 1
    fi
    sed -n 's/^\t"Dir": "\(.*\)",$/\1/p' <<<"$said"
}

built() { # binary module version package: into $work/binary
    local flags="-s -w" major minor folder package=$4
    if [[ $2 == go.etcd.io/* || $2 == k8s.io/* ]]; then
        IFS=. read -r major minor _ <<<"${3#v}"
        local set="-X k8s.io/component-base/version" # without these the server calls itself v0.0.0
        flags+=" $set.gitVersion=$3 $set.gitMajor=$major $set.gitMinor=$minor $set.gitTreeState=clean"
        package=$2${4#.}
        folder=$(wrapped "$2" "$3") && cd "$folder" && go get "$package@$3" || return
    else
        folder=$(fetched "$2" "$3") && cd "$folder" || return
    fi
    go build -trimpath -ldflags "$flags" -o "$work/$1" "$package"
}

with_go() {
    command -v go >/dev/null && return
    echo "make kube compiles Kubernetes: install Go 1.26 or newer, then run it again" >&2
    exit 1
}

there() { [[ -x $cache/bin/$1 || (-n ${KUBEBUILDER_ASSETS-} && -x $KUBEBUILDER_ASSETS/$1) ]]; }

mapfile -t lines < <(grep -v '^#' "$pins")
number=0
for line in "${lines[@]}"; do
    read -r name module version package crds <<<"$line"
    number=$((number + 1))
    label="[$number/${#lines[@]}] $name"
    [[ $name == *"$version" ]] || label+=" $version"
    if [[ $crds != - && ! -d $cache/crds/$name ]]; then
        with_go
        source=$(fetched "$module" "$version")
        mkdir "$work/crds"
        find "$source/$crds" -maxdepth 1 -name '*.yaml' ! -name 'kustomization.yaml' -exec cp --no-preserve=mode {} "$work/crds" \;
        mv "$work/crds" "$cache/crds/$name"
    fi
    if there "$name"; then
        echo "$label ... there"
        continue
    fi
    with_go
    began=$SECONDS
    printf '%s ... ' "$label"
    (built "$name" "$module" "$version" "$package") >"$work/log" 2>&1 || {
        echo "failed"
        tail -n 30 "$work/log" >&2
        exit 1
    }
    mv "$work/$name" "$cache/bin/$name" # at once: an interrupted build leaves no half binary
    echo "$((SECONDS - began)) s"
done
echo "in $cache/bin"
