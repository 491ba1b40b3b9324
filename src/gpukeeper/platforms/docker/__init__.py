"""Docker hosts, and Podman over the same API: containers, their leftovers, images, the build cache."""
