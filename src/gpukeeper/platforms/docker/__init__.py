"""Docker hosts. This version finds them; looking at them comes next."""
