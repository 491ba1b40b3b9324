"""Ray nodes: dead sessions, logs of ended workers, temporary trees."""
