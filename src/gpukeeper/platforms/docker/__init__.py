"""Docker hosts, and Podman by the same API: containers, what they left behind, images, the builder's cache."""
