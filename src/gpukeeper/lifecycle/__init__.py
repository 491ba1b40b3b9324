"""What should happen. Pure: same view, policy and time give the same decision."""
