"""Where a pass over a loader stands, exactly."""
