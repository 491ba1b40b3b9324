"""Ray clusters. This version finds them; looking at them comes next."""
